"""A synthetic worker: it claims what was asked for and writes tokens by the real scripts."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from millstream.api.auth.caller import ANONYMOUS_ID
from millstream.shared.connection import open_redis
from millstream.shared.keys import Keys
from millstream.shared.schemas import TaskRequest, encode_request, new_task_id
from millstream.shared.scripts import Scripts
from millstream.shared.steps import AppendRow

SHARD = Keys(0)
BATCH = 64  # tasks of one decode step, as a busy worker has them


@dataclass
class Stream:
    """A claimed task."""

    task_id: str
    written: int = 0


class Writer:
    """Owns tasks, and writes them on."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self.streams: list[Stream] = []

    async def submit(self, count: int, model: str = "m") -> list[str]:
        """Tasks that wait, of a caller without a key; their ids."""
        request = encode_request(TaskRequest(model, prompt="x"))
        task_ids = [new_task_id(SHARD.shard) for _ in range(count)]
        for task_id in task_ids:
            await self._scripts.submit(
                SHARD, task_id=task_id, model=model, caller=ANONYMOUS_ID, request=request,
                max_queue=20_000, live_ttl_s=3600,
            )  # fmt: skip
        return task_ids

    async def claim(self, count: int) -> None:
        """Take so many tasks; they must have been submitted."""
        self.streams = []
        while len(self.streams) < count:
            claims, _ = await self._scripts.claim(
                SHARD, worker="w", model="m", free=min(BATCH, count - len(self.streams)),
                running=len(self.streams), lease_s=3600, max_attempts=3, live_ttl_s=3600,
                result_ttl_s=60, max_task_s=3600, sweep=False,
            )  # fmt: skip
            self.streams += [Stream(claim.task_id) for claim in claims]

    async def write(self, streams: list[Stream], tokens: int, *, end: bool = False) -> None:
        """One call: so many tokens for each of these streams, stamped with the time."""
        event = ("7", f'"~{time.monotonic_ns():016d}"')
        rows = [
            AppendRow(
                stream.task_id, 1, 100, stream.written + 1, [event] * tokens,
                "completed" if end else "", "stop",
            )
            for stream in streams
        ]  # fmt: skip
        answers = await self._scripts.append(
            SHARD, worker="w", model="m", result_ttl_s=60, rows=rows
        )
        for stream, answer in zip(streams, answers, strict=True):
            if answer < 0:
                raise RuntimeError(f"append was refused: {answer}")
            stream.written = answer

    async def step(self, tokens: int = 1, *, end: bool = False) -> None:
        """So many tokens for all streams, a call for each batch of a worker."""
        batches = [self.streams[at : at + BATCH] for at in range(0, len(self.streams), BATCH)]
        await asyncio.gather(*(self.write(batch, tokens, end=end) for batch in batches))

    async def pace(self, rate: float, seconds: float) -> None:
        """So many tokens a second on each stream, as `evenly` spreads them."""
        await evenly(lambda streams: self.write(streams, 1), self.streams, rate, seconds)


async def evenly(
    write: Callable[[list[Any]], Awaitable[object]], streams: list[Any], rate: float, seconds: float
) -> None:
    """Write so many tokens a second to each stream, evenly spread over all of them.

    A call carries what became due during the last one, as a worker's publisher does it.
    """
    loop = asyncio.get_running_loop()
    began, done = loop.time(), 0
    while (now := loop.time()) - began < seconds:
        due = int((now - began) * rate * len(streams))
        if due == done:
            await asyncio.sleep(0.0001)
            continue
        due = min(due, done + len(streams))
        await write([streams[at % len(streams)] for at in range(done, due)])
        done = due


@asynccontextmanager
async def open_writer(redis_url: str) -> AsyncGenerator[Writer]:
    """A writer on a Valkey."""
    async with open_redis(redis_url) as client:
        yield Writer(Scripts(client))
