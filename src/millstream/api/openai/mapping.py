"""Pure mappings from OpenAI's wire format to the protocol."""

import hashlib
from collections.abc import Sequence

import msgspec

from millstream.api.openai.schemas import ChatCompletionRequest, ChatMessage, Sampling
from millstream.shared.schemas import Message, SamplingParams


def role_of(role: str) -> str:
    """OpenAI's newer word for the system is the old one to every template."""
    return "system" if role == "developer" else role


def messages_of(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """The conversation."""
    return tuple(Message(role_of(message.role), message.text) for message in messages)


def sampling_of(body: Sampling, max_tokens: int | None) -> SamplingParams:
    """The sampling settings, with OpenAI's defaults where the caller gave none."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_p=1.0 if body.top_p is None else float(body.top_p),
        top_k=max(body.top_k or 0, 0),
        seed=body.seed,
        stop=stop,
    )


def choices_of(sampling: SamplingParams, n: int) -> list[SamplingParams]:
    """The settings of n choices: alike, but each with a seed of its own made from the caller's.

    The first has the caller's, so one choice is the first of several. Without a seed each task
    gets one from its id, so they differ as well.
    """
    choices = [sampling]
    for choice in range(1, n):
        seed = sampling.seed
        if seed is not None:
            digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest) >> 1
        choices.append(msgspec.structs.replace(sampling, seed=seed))
    return choices


def chat_max_tokens(body: ChatCompletionRequest) -> int | None:
    """The bound on the answer; the newer name wins."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
