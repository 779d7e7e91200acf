"""What a worker asks of an engine: token ids in, token ids out, one batch of outputs per step.

The engine knows nothing of Redis, text, stop strings or attempts; all that sits above it, once, for
every engine. It runs its steps on a thread of its own and hands the outputs of a whole step to the
event loop in one call, since a wake-up per token costs more than the token's own bookkeeping
(docs/adr/0003-engines-deliver-steps.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from millstream.shared.schemas import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One attempt at one task, as the engine sees it.

    `token_ids` is the prompt followed by what earlier attempts emitted; `prompt_length` says where
    the prompt ends, so `len(token_ids) - prompt_length` is the position of the next token. Sampling
    depends on (seed, position) and nothing else, so any worker goes on alike.
    """

    request_id: str
    """Unique over all attempts: `<task id>:<attempt>`."""
    token_ids: Sequence[int]
    prompt_length: int
    max_new_tokens: int
    """How many more tokens may come; at least 1."""
    seed: int | None
    """As the caller gave it; None if the caller did not care."""
    fallback_seed: int
    """To use where `seed` is None: a function of the task's id, so the same on any worker."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all."""
    min_p: float = 0.0
    """Tokens less likely than this part of the likeliest are out; after temperature, before
    top_k and top_p."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in `token_ids` or the answer, multiplies negative ones."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that came after the prompt, over all attempts."""
    frequency_penalty: float = 0.0
    """The same, for each time that they came."""
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    """Added to logits, before the penalties."""
    logprobs: int | None = None
    """How many alternatives to tell with each token's log probability; None: neither."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model held a token, and what it held likeliest at its place.

    Natural logarithms of the softmax of the model's own logits: before bias, penalties,
    temperature and all else.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), best first; as many as were asked for, or as there are."""


class StepOutput(msgspec.Struct, frozen=True):
    """What one step brought for one request; exactly one output of a request has a `finish`."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    """New tokens, in order; the end-of-sequence token is never among them."""
    finish: str | None = None
    """None: goes on. "stop": end token. "length": budget used up. "error": see `error`."""
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token id, for a request that asked for them."""


OnStep = Callable[[list[StepOutput]], None]
"""Called on the event loop, once per step, with the outputs of all requests that got some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a started engine is."""

    vocabulary_size: int
    """Token ids that a caller may name are 0 <= id < vocabulary_size; 0 means any."""
    context_length: int
    """Prompt and answer together, in tokens."""
    cache_tokens: int
    """Tokens of KV cache over all requests; 0 means unbounded."""
    suggested_sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the model's makers suggest to sample with, of `temperature`, `top_p` and `top_k`."""
    numerics: str
    """Names what greedy text depends on (device, dtype, kernels), for people comparing runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """A cheap look at the engine; may be called from any thread, at any time."""

    active: int
    """Requests submitted and not finished."""
    steps: int
    """Steps done since the start; stands still while `active > 0` when the engine hangs."""
    fatal: str | None = None
    """Why the engine can never make a step again, or None."""


class Tokenizer(Protocol):
    """Text to token ids and back; called from a thread, never from the event loop."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Render messages by the model's chat template, ending where the answer begins."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode plain text as the model wants a prompt (with its begin token, if it has one)."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode ids, leaving out special tokens; bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, which need not be whole characters; a special one its name."""
        ...

    @property
    def text_bytes(self) -> Callable[[int], bytes] | None:
        """What one token adds to a text's bytes, a special one nothing.

        None where `decode` is more than these bytes put together and read as UTF-8.
        """
        ...


class Engine(Protocol):
    """One loaded model that generates for many requests at once.

    Life: `start` once, then `submit` and `cancel` from the event loop, then `stop` once.
    """

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; there once `start` has returned."""
        ...

    async def start(self, on_step: OnStep) -> EngineInfo:
        """Load the model and start stepping.

        Raises:
            SettingsError: the model cannot be loaded as set; says what to do.
        """
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Take a request into the batch; its outputs arrive through `on_step`.

        Raises:
            InvalidRequest: it can never run here (too long for the cache, id out of vocabulary,
                a parameter that this engine cannot honour).
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Drop a request within one step; no output of it arrives after this call."""
        ...

    def health(self) -> EngineHealth:
        """How the engine does."""
        ...

    async def stop(self) -> None:
        """End all requests without further outputs and free the model."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is built from; a selection of the worker's settings."""

    model: str
    source: str
    device: str = "auto"
    dtype: str = "auto"
    max_concurrent: int = 32
    trust_remote_code: bool = False
    fake_tokens_per_s: float = 0.0
    on_progress: Callable[[str], None] = field(default=lambda _: None)
    """Told in a few words what a long start is doing."""
