"""What tests of faults share: prompts that stand still at a known token, and watched streams."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import httpx
from tests.support import sse
from tests.support.local_fleet import LocalFleet, Process
from tests.support.waiting import eventually

from millstream.shared.keys import Keys
from millstream.shared.schemas import Message
from millstream.worker.engines.fake_script import FakeTokenizer, read_script

RUNS = int(os.environ.get("FAULT_RUNS", "1"))
LEASE_S = 2.0
SWEEP_S = LEASE_S / 4 * 1.25  # the longest: polls vary by a quarter
KILL_BAR_S = LEASE_S + SWEEP_S + 1
DRAIN_BAR_S = 1.0
HOLD_S = 60.0  # longer than any test: whoever holds is killed, stopped or taken over
# What even a machine with too much to do must keep to.
SLACK_S = 10.0


def busy() -> float:
    """By how much work takes longer here and now than on a machine that has the time for it."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def prompt(text: str = "once upon a time", **directive: object) -> str:
    """A prompt for the fake engine."""
    return f"@fake {json.dumps(directive)}\n{text}"


def held(*after: int, **directive: object) -> str:
    """A prompt whose task stands still after so many tokens, once per worker that gets there."""
    return prompt(delay_s=HOLD_S, delay_at=[number + 1 for number in after], **directive)


def undisturbed(text: str, *, tokens: int, seed: int = 0, chat: bool = False) -> str:
    """What a prompt gives; the fake engine's words depend on prompt, seed and position alone."""
    tokenizer = FakeTokenizer()
    ids = tokenizer.encode_chat([Message("user", text)]) if chat else tokenizer.encode(text)
    token_at = read_script(ids, seed).token_at
    return tokenizer.decode([token_at(position) for position in range(tokens)])


class Watched:
    """A stream that is read in the background, and when each of its frames came."""

    def __init__(self, http: httpx.AsyncClient, method: str, url: str, **request: Any) -> None:
        self.frames: list[sse.Frame] = []
        self.times: list[float] = []
        self.pings: list[float] = []
        """When keepalives came."""
        self.task_id = ""
        self._open = http.stream(method, url, **request)
        self._opened = asyncio.Event()
        self.reading = asyncio.create_task(self._read())

    async def __aenter__(self) -> Self:
        await asyncio.wait(
            {self.reading, opened := asyncio.create_task(self._opened.wait())},
            return_when=asyncio.FIRST_COMPLETED,
        )
        opened.cancel()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.reading.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)

    async def _read(self) -> None:
        async with self._open as answer:
            assert answer.status_code == 200, answer.status_code
            self.task_id = answer.headers.get("x-task-id", self.task_id)
            self._opened.set()
            async for frame in sse.frames(self._lines(answer)):
                if frame.event != "queued":
                    self.frames.append(frame)
                    self.times.append(time.monotonic())

    async def _lines(self, answer: httpx.Response) -> AsyncIterator[str]:
        async for line in answer.aiter_lines():
            if line.startswith(": ping"):
                self.pings.append(time.monotonic())
            yield line

    @property
    def numbers(self) -> list[int]:
        """Of the token events."""
        return [int(frame.id or 0) for frame in self.frames if frame.event == "token"]

    def gap_after(self, moment: float) -> float:
        """From a moment to the next frame."""
        return min(at for at in self.times if at > moment) - moment

    async def upto(self, count: int) -> None:
        """Wait until so many frames have come."""

        async def look() -> bool:
            assert not self.reading.done() or len(self.frames) >= count, self.reading
            return len(self.frames) >= count

        await eventually(look, within_s=20, what=f"{count} frames")

    async def end(self) -> list[sse.Frame]:
        """All frames, once the server has ended the stream."""
        await self.reading
        return self.frames


async def submit(http: httpx.AsyncClient, text: str, **fields: object) -> str:
    """Hand a task in; its id."""
    answer = await http.post("/tasks", json={"prompt": text, **fields})
    assert answer.status_code == 202, answer.text
    return answer.json()["task_id"]


def watch(http: httpx.AsyncClient, task_id: str, after: int = 0) -> Watched:
    """The native stream of a task."""
    headers = {"Last-Event-ID": str(after)}
    stream = Watched(http, "GET", f"/tasks/{task_id}/stream", headers=headers)
    stream.task_id = task_id
    return stream


def watch_chat(http: httpx.AsyncClient, text: str, **fields: object) -> Watched:
    """OpenAI's stream of a new task."""
    body = {"messages": [{"role": "user", "content": text}], "stream": True, **fields}
    return Watched(http, "POST", "/v1/chat/completions", json=body)


async def written(fleet: LocalFleet, counts: dict[str, int], within_s: float = 15) -> None:
    """Wait until the tasks run and their logs have exactly so many events."""

    async def look() -> bool:
        pipe = fleet.redis.pipeline(transaction=False)
        for task_id in counts:
            pipe.hmget(Keys(0).task(task_id), "state", "seq")
        answers = await pipe.execute()
        return [(state, int(seq)) for state, seq in answers] == [
            (b"running", count) for count in counts.values()
        ]

    await eventually(look, within_s=within_s, what=f"the logs of {len(counts)} tasks")


async def fields_of(fleet: LocalFleet, task_id: str) -> dict[str, str]:
    """A task's hash."""
    return await fleet.scripts.task_fields(Keys(0), task_id)


async def worker_id(fleet: LocalFleet, process: Process) -> str:
    """The id under which a worker process is in the fleet."""

    async def look() -> str:
        return next((info.id for info in await fleet.workers() if info.pid == process.pid), "")

    return await eventually(look, what="the worker on the roster")


async def owners(fleet: LocalFleet, model: str = "fake") -> dict[str, str]:
    """Entry of the queue to the consumer that holds it, as Redis has it."""
    rows: Sequence[dict[str, Any]] = await fleet.redis.xpending_range(
        Keys(0).queue(model), "workers", "-", "+", 1000
    )
    return {row["message_id"].decode(): row["consumer"].decode() for row in rows}
