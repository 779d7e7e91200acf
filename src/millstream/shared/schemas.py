"""What a task is: the frozen values that API and worker exchange, and their JSON form."""

import re
import secrets
from typing import Any

import msgspec

_TASK_ID = re.compile(r"t(0|[1-9]\d{0,3})-[a-z2-7]{26}")
_LETTERS = 8 * b"abcdefghijklmnopqrstuvwxyz234567"
"""What a byte stands for: each letter for as many as the others."""


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation; `role` is `system`, `user` or `assistant`."""

    role: str
    content: str


class EarlyStop(msgspec.Struct, frozen=True):
    """End when the model is no longer sure of what it says."""

    min_prob: float
    window: int
    """Of how many last tokens the mean probability has to reach `min_prob`."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose tokens and when to end."""

    max_tokens: int | None = None
    """None: as many as the model's context and the server's limit allow."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all."""
    min_p: float = 0.0
    """Tokens less likely than this part of the likeliest are out."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the answer has."""
    frequency_penalty: float = 0.0
    """The same, for each time that it has them."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens that prompt or answer have."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids."""
    logprobs: int | None = None
    """How many alternatives to tell with each token's log probability; None: neither."""
    early_stop: EarlyStop | None = None

    @property
    def records_logprobs(self) -> bool:
        """Whether the log has to hold how likely each token was."""
        return self.logprobs is not None or self.early_stop is not None


class ResponseOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a task of `/v1/responses` has besides: for pods to read again, of no use to workers."""

    created_at: int
    """Unix time in seconds."""
    background: bool = False
    """No connection has to stay for it."""
    store: bool = True
    """It can be asked for again by its id."""
    instructed: bool = False
    """The first message is the request's `instructions`, which no later turn inherits."""
    previous_response_id: str | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    service_tier: str = "default"
    """The class it was given, in OpenAI's words."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class TaskRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the caller asked for: a conversation, a plain prompt, or a prompt's token ids."""

    model: str
    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    sampling: SamplingParams = SamplingParams()
    response: ResponseOptions | None = None
    """None: it was not asked for by `/v1/responses`."""
    prompt_ids: tuple[int, ...] = ()
    echo: bool = False
    """Whether the answer's text begins with the prompt."""
    traceparent: str = ""
    """The trace that its workers continue, as W3C's header says it; '' for none."""

    @property
    def texts(self) -> list[str]:
        """What the model is to read, but for token ids."""
        return [self.prompt or "", *(message.content for message in self.messages)]

    @property
    def prompt_chars(self) -> int:
        """Characters of the prompt, all messages together; a token id counts as four."""
        return sum(map(len, self.texts)) + 4 * len(self.prompt_ids)


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one task over all its attempts; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    def to_dict(self) -> dict[str, int]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
        }


_request_decoder = msgspec.json.Decoder(TaskRequest)
_encode = msgspec.json.Encoder().encode


def encode_request(request: TaskRequest) -> bytes:
    """The form in which a request lies in the task's hash."""
    return _encode(request)


def decode_request(data: bytes) -> TaskRequest:
    """Undo `encode_request`; unknown fields of a newer pod are ignored."""
    return _request_decoder.decode(data)


def new_task_id(shard: int) -> str:
    """An unguessable id (130 random bits, RFC 4648 base32) that carries its shard."""
    return f"t{shard}-{secrets.token_bytes(26).translate(_LETTERS).decode()}"


def shard_of(task_id: str) -> int | None:
    """The shard that a task id carries, or None if it is no task id."""
    match = _TASK_ID.fullmatch(task_id)
    return int(match.group(1)) if match else None


def to_json(value: Any) -> bytes:
    """Compact JSON for values of the protocol."""
    return _encode(value)
