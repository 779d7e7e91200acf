"""F20: prompts of any size are answered at once, in bounded memory, and harm nobody."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.support.fault_report import FaultRun
from tests.support.faults import busy
from tests.support.local_fleet import LocalFleet

from millstream.worker.engines.fake import CONTEXT_LENGTH

ANSWERED_WITHIN_S = 2.0
HEALTH_WITHIN_S = 0.1
TRIES = 3  # others may get in between


class Megabytes:
    """A body that has no length until it has been sent; as often as it is asked for."""

    def __init__(self, count: int) -> None:
        self._count = count

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self._count):
            yield b"x" * 1_000_000


async def answered_in_time(http: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    """The answer to a request, which one of a few equal ones must get within the time."""
    for _ in range(TRIES):
        asked_at = time.monotonic()
        answer = await http.post(path, **body)
        if time.monotonic() - asked_at < ANSWERED_WITHIN_S * busy():
            return answer
    raise AssertionError(f"no answer within {ANSWERED_WITHIN_S * busy():g} s")


async def answered_beside_others(
    http: httpx.AsyncClient, other: httpx.AsyncClient, path: str, **body: Any
) -> httpx.Response:
    """As `answered_in_time`; meanwhile no probe may wait long, in one of a few equal tries."""
    longest: list[float] = []
    for _ in range(TRIES):
        asking = asyncio.create_task(answered_in_time(http, path, **body))
        longest.append(0.0)
        while not asking.done():
            asked_at = time.monotonic()
            assert (await other.get("/health")).status_code == 200
            longest[-1] = max(longest[-1], time.monotonic() - asked_at)
        if longest[-1] < HEALTH_WITHIN_S * busy():
            return await asking
    raise AssertionError(f"others waited {longest} s")


@pytest.mark.fault("F20 huge prompts")
async def test_what_is_too_large_is_refused_early(fleet: LocalFleet, fault: FaultRun) -> None:
    api, _ = await asyncio.gather(fleet.api(), fleet.worker())
    deep = "[" * 20_000 + "]" * 20_000
    parts = json.dumps([{"type": "text", "text": "x"}] * 1_000_000)
    cases = {
        "ten megabytes": (b'{"prompt":"' + b"x" * 10_000_000 + b'"}', 413),
        "a gigabyte in chunks": (Megabytes(1000), 413),
        "deep": (f'{{"prompt":{deep}}}'.encode(), 400),
        "deep tools": (f'{{"prompt":"x","tools":{deep}}}'.encode(), 400),
        "a million messages": (b'{"messages":[' + b"{}," * 999_999 + b"{}]}", 400),
        "messages beyond the body": (
            b'{"messages":[' + b'{"role":"user","content":"x"},' * 1_000_000 + b"{}]}",
            413,
        ),
        "a million parts": (f'{{"messages":[{{"role":"user","content":{parts}}}]}}'.encode(), 413),
    }
    async with (
        httpx.AsyncClient(base_url=api.url, timeout=20) as http,
        httpx.AsyncClient(base_url=api.url, timeout=20) as other,
    ):
        assert (await http.post("/tasks", json={"prompt": "warm"})).status_code == 202
        before = api.memory_mb()
        for name, (content, status) in cases.items():
            answer = await answered_beside_others(http, other, "/tasks", content=content)
            assert answer.status_code == status, (name, answer.text)
            assert answer.json()["error"]["message"]
            normal = await http.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
            )
            assert normal.status_code == 200, name
            fault.hits += 1
        # A body is a few megabytes at the most; a crowd of tiny values is some thirty times that.
        assert api.memory_mb(peak=True) - before < 200
    await fleet.quiet()


@pytest.mark.fault("F20 prompts around the context")
async def test_the_context_is_exact(fleet: LocalFleet, fault: FaultRun) -> None:
    api, _ = await asyncio.gather(fleet.api(max_prompt_chars=3_000_000), fleet.worker(lease_s=20))
    marks = 2  # of the user's and the assistant's turn
    async with httpx.AsyncClient(base_url=api.url, timeout=28) as http:
        for words, status, tokens in (
            (CONTEXT_LENGTH - marks - 1, 200, 1),
            (CONTEXT_LENGTH - marks, 200, 0),
            (CONTEXT_LENGTH - marks + 1, 400, 0),
        ):
            body = {"messages": [{"role": "user", "content": "a " * (words - 1) + "a"}]}
            answer = await answered_in_time(http, "/v1/chat/completions", json=body)
            assert answer.status_code == status, answer.text[:300]
            if status == 200:
                whole = answer.json()
                assert whole["usage"]["completion_tokens"] == tokens
                assert whole["usage"]["total_tokens"] == words + marks + tokens
                assert whole["choices"][0]["finish_reason"] == "length"
            else:
                assert answer.json()["error"]["code"] == "context_length_exceeded"
                assert answer.json()["error"]["param"] == "messages"
            fault.hits += 1
    await fleet.quiet()
