"""One request, timed as its client sees it."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx2

from millstream.fleet.bench.workload import Ask


@dataclass(slots=True)
class Outcome:
    """What came of a request; times in seconds on this process's monotonic clock."""

    began: float
    ended: float = 0.0
    chunks: list[float] = field(default_factory=list[float])
    """When each piece of text arrived."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    """'' or a few words: the status and code of an error, or what broke."""

    @property
    def ttft(self) -> float:
        """Time to the first piece of text."""
        return self.chunks[0] - self.began

    @property
    def e2el(self) -> float:
        """Time to the end."""
        return self.ended - self.began

    @property
    def tpot(self) -> float | None:
        """Time per token after the first; None where there is no second one."""
        if self.output_tokens < 2:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Times between pieces."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


async def ask_chat(
    http: httpx2.AsyncClient, ask: Ask, *, model: str, temperature: float
) -> Outcome:
    """Ask by `POST /v1/chat/completions`, streamed."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": ask.prompt}],
        "max_tokens": ask.max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    outcome = Outcome(time.monotonic())
    finished = False
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                outcome.error = _refusal(answer)
            else:
                async for data in _data(answer.aiter_raw()):
                    finished = _take(outcome, data) or finished
    except httpx2.HTTPError as error:
        outcome.error = type(error).__name__
    outcome.ended = time.monotonic()
    if not outcome.error and not finished:
        outcome.error = "cut"
    elif not outcome.error and not outcome.chunks:
        outcome.error = "no text"
    return outcome


def _take(outcome: Outcome, data: dict[str, Any]) -> bool:
    """Count one message; whether it says that the answer is complete."""
    if "error" in data:
        outcome.error = str(data["error"].get("code") or data["error"].get("type"))
        return False
    if usage := data.get("usage"):
        outcome.prompt_tokens = usage["prompt_tokens"]
        outcome.output_tokens = usage["completion_tokens"]
    choices: list[dict[str, Any]] = data.get("choices") or []
    if choices and choices[0]["delta"].get("content"):
        outcome.chunks.append(time.monotonic())
    return bool(choices) and choices[0].get("finish_reason") is not None


async def _data(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each `data:` line but `[DONE]`; also of servers that end lines by CR LF."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                yield json.loads(data)


def _refusal(answer: httpx2.Response) -> str:
    try:
        return f"{answer.status_code} {answer.json()['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return str(answer.status_code)
