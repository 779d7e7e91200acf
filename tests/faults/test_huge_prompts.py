"""F20: prompts of any size are answered at once, in bounded memory, and harm nobody."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from tests.support.fault_report import FaultRun
from tests.support.local_fleet import LocalFleet

from millstream.worker.engines.fake import CONTEXT_LENGTH

REFUSED_WITHIN_S = 2.0
SLACK = 3.0  # a machine with too much to do


async def megabytes(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * 1_000_000


@pytest.mark.fault("F20 huge prompts")
async def test_what_is_too_large_is_refused_early(fleet: LocalFleet, fault: FaultRun) -> None:
    api, _ = await asyncio.gather(fleet.api(), fleet.worker())
    deep = "[" * 20_000 + "]" * 20_000
    parts = json.dumps([{"type": "text", "text": "x"}] * 1_000_000)
    cases = {
        "ten megabytes": (b'{"prompt":"' + b"x" * 10_000_000 + b'"}', 413),
        "a gigabyte in chunks": (megabytes(1000), 413),
        "deep": (f'{{"prompt":{deep}}}'.encode(), 400),
        "deep tools": (f'{{"prompt":"x","tools":{deep}}}'.encode(), 400),
        "a million messages": (b'{"messages":[' + b"{}," * 999_999 + b"{}]}", 400),
        "messages beyond the body": (
            b'{"messages":[' + b'{"role":"user","content":"x"},' * 1_000_000 + b"{}]}",
            413,
        ),
        "a million parts": (f'{{"messages":[{{"role":"user","content":{parts}}}]}}'.encode(), 413),
    }
    pauses: list[float] = []
    done = asyncio.Event()

    async def probe() -> None:
        async with httpx.AsyncClient(base_url=api.url, timeout=20) as other:
            while not done.is_set():
                asked_at = time.monotonic()
                assert (await other.get("/health")).status_code == 200
                pauses.append(time.monotonic() - asked_at)

    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        assert (await http.post("/tasks", json={"prompt": "warm"})).status_code == 202
        before = api.memory_mb()
        probing = asyncio.create_task(probe())
        for name, (content, status) in cases.items():
            asked_at = time.monotonic()
            answer = await http.post("/tasks", content=content)
            assert answer.status_code == status, (name, answer.text)
            assert time.monotonic() - asked_at < REFUSED_WITHIN_S * SLACK, name
            assert answer.json()["error"]["message"]
            normal = await http.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
            )
            assert normal.status_code == 200, name
            fault.hits += 1
        done.set()
        await probing
        pauses.sort()
        assert pauses[len(pauses) * 99 // 100] < 0.1 * SLACK
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
            answer = await http.post("/v1/chat/completions", json=body)
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
