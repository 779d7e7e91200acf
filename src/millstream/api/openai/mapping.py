"""Pure mappings from OpenAI's wire format to the protocol."""

import hashlib
from collections.abc import Sequence

import msgspec

from millstream.api.openai.completion_schemas import DEFAULT_MAX_TOKENS, CompletionRequest
from millstream.api.openai.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    EarlyStopping,
    Sampling,
)
from millstream.shared.schemas import EarlyStop, Message, SamplingParams, TaskRequest
from millstream.shared.states import Priority


def role_of(role: str) -> str:
    """OpenAI's newer word for the system is the old one to every template."""
    return "system" if role == "developer" else role


def messages_of(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """The conversation."""
    return tuple(Message(role_of(message.role), message.text) for message in messages)


def sampling_of(
    body: Sampling,
    max_tokens: int | None,
    *,
    logprobs: int | None = None,
    early_stop: EarlyStopping | None = None,
) -> SamplingParams:
    """The sampling settings, with OpenAI's defaults where the caller gave none.

    Args:
        body: What the caller sent.
        max_tokens: The bound on the answer, which each form has under a name of its own.
        logprobs: How many alternatives to tell with each token's log probability.
        early_stop: When to end for want of confidence.
    """
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_p=1.0 if body.top_p is None else float(body.top_p),
        top_k=max(body.top_k or 0, 0),
        min_p=float(body.min_p or 0),
        seed=body.seed,
        stop=stop,
        presence_penalty=float(body.presence_penalty or 0),
        frequency_penalty=float(body.frequency_penalty or 0),
        repetition_penalty=float(body.repetition_penalty or 1),
        logit_bias={int(token): float(bias) for token, bias in (body.logit_bias or {}).items()},
        logprobs=logprobs,
        early_stop=None
        if early_stop is None
        else EarlyStop(float(early_stop.min_prob), early_stop.window),
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


def priority_of(service_tier: str | None) -> Priority | None:
    """The class that OpenAI's tier asks for: `flex` is the cheaper one that may wait."""
    return Priority.BATCH if service_tier == "flex" else None


def chat_tasks(body: ChatCompletionRequest) -> list[TaskRequest]:
    """A task for each choice of a chat."""
    newer, older = body.max_completion_tokens, body.max_tokens  # the newer name wins
    sampling = sampling_of(
        body,
        older if newer is None else newer,
        logprobs=body.alternatives,
        early_stop=body.early_stop,
    )
    messages = messages_of(body.messages)
    return [
        TaskRequest(body.model or "", messages, sampling=choice)
        for choice in choices_of(sampling, body.n or 1)
    ]


def completion_tasks(body: CompletionRequest) -> list[TaskRequest]:
    """A task for each choice of each prompt, in the order of their indexes."""
    sampling = sampling_of(
        body,
        DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        early_stop=body.early_stop,
    )
    return [
        TaskRequest(
            body.model or "",
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=() if isinstance(prompt, str) else tuple(prompt),
            echo=bool(body.echo),
            sampling=choice,
        )
        for prompt in body.prompts
        for choice in choices_of(sampling, body.n or 1)
    ]
