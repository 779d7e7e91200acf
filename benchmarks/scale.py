"""Whether a token, a claim and a submit cost the store the same however large the fleet is.

    python -m benchmarks.scale [--json FILE]

Starts a Valkey for each row, with an append-only file. Workers are made up: each owns some streams
and writes one step after the other, one token a stream, by the real scripts. Three series: more
workers of 16 streams each, more open streams at the same 16 a step, more shards. Figures are
microseconds of the server's CPU, medians of batches in which the rows of a series take turns; the
ratio of a token's to that of the first row is the median of those within each turn.
"""

import argparse
import asyncio
import statistics
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.support.processes import valkey
from benchmarks.support.report import Row, finish
from millstream.shared.connection import open_redis
from millstream.shared.keys import Keys
from millstream.shared.schemas import new_task_id
from millstream.shared.scripts import Scripts
from millstream.shared.steps import AppendRow

STEP = 16  # streams a worker writes in one call
CALLS = {"submit": 480, "claim": 480, "step": 2880}  # in batches
BATCHES = 24
REQUEST = b'{"model": "m", "messages": [{"role": "user", "content": "' + b"x" * 400 + b'"}]}'


@dataclass(frozen=True)
class Size:
    """How large the fleet of a row is."""

    workers: int
    streams: int
    shards: int


SERIES = {
    "workers": [Size(workers, STEP * workers, 1) for workers in (1, 10, 100)],
    "open streams": [Size(10, streams, 1) for streams in (160, 1_600, 10_000)],
    "shards": [Size(10, 1_600, shards) for shards in (1, 4, 16)],
}


class Fleet:
    """Made-up workers and callers, on a real store."""

    def __init__(self, client: Any, size: Size) -> None:
        self.client = client
        self.scripts = Scripts(client)
        self.size = size
        self.owned: list[list[str]] = [[] for _ in range(size.workers)]
        self.written: dict[str, int] = {}

    def shard_of(self, worker: int) -> int:
        """Steps of a worker go to one shard each; over all of them, shards are used alike."""
        return worker % self.size.shards

    async def submit(self, number: int) -> None:
        """One more task."""
        shard = self.shard_of(number % self.size.workers)
        await self.scripts.submit(
            Keys(shard), task_id=new_task_id(shard), model="m", caller=f"caller {number % 20}",
            request=REQUEST, max_queue=10**6, live_ttl_s=3600,
        )  # fmt: skip

    async def claim(self, number: int) -> None:
        """One task, for the worker whose turn it is."""
        worker = number % self.size.workers
        claims, _ = await self.scripts.claim(
            Keys(self.shard_of(worker)), worker=f"w{worker}", model="m", free=1, running=0,
            lease_s=3600, max_attempts=3, live_ttl_s=3600, result_ttl_s=60, max_task_s=3600,
            sweep=False,
        )  # fmt: skip
        for claim in claims:
            self.owned[worker].append(claim.task_id)
            self.written[claim.task_id] = 0

    async def step(self, number: int) -> None:
        """One token for the next 16 streams of the worker whose turn it is."""
        worker = number % self.size.workers
        owned = self.owned[worker]
        at = number // self.size.workers * STEP % max(1, len(owned) - STEP + 1)
        rows = []
        for task_id in owned[at : at + STEP]:
            rows.append(AppendRow(task_id, 1, 100, self.written[task_id] + 1, [("7", '" x"')]))
            self.written[task_id] += 1
        await self.scripts.append(
            Keys(self.shard_of(worker)), worker=f"w{worker}", model="m", result_ttl_s=60, rows=rows
        )

    async def fill(self) -> None:
        """As many streams as it is to have, all claimed."""
        for call in (self.submit, self.claim):
            for number in range(self.size.streams):
                await call(number)

    async def cost_us(self, kind: str, batch: int) -> float:
        """The store's CPU microseconds for one of a batch of calls."""
        calls = CALLS[kind] // BATCHES
        call = getattr(self, kind)
        before = await self._cpu_s()
        for number in range(batch * calls, (batch + 1) * calls):
            await call(number)
        return 1e6 * (await self._cpu_s() - before) / calls

    async def _cpu_s(self) -> float:
        info = await self.client.info("cpu")
        return info["used_cpu_user"] + info["used_cpu_sys"]


@asynccontextmanager
async def filled(size: Size) -> AsyncGenerator[Fleet]:
    """A fleet of that size on a Valkey of its own."""
    with valkey() as store:
        async with open_redis(store.url) as client:
            fleet = Fleet(client, size)
            await fleet.fill()
            yield fleet


async def measure(series: str) -> list[Row]:
    """The rows of a series."""
    async with AsyncExitStack() as stack:
        fleets = [await stack.enter_async_context(filled(size)) for size in SERIES[series]]
        turns = {
            kind: [
                [await fleet.cost_us(kind, batch) for fleet in fleets] for batch in range(BATCHES)
            ]
            for kind in CALLS
        }
    rows: list[Row] = []
    for at, fleet in enumerate(fleets):
        submit, claim, step = (
            statistics.median(turn[at] for turn in turns[kind]) for kind in CALLS
        )
        ratio = statistics.median(turn[at] / turn[0] for turn in turns["step"])
        costs = {"submit_us": submit, "claim_us": claim, "token_us": step / STEP, "ratio": ratio}
        rows.append(Row("millstream", series, asdict(fleet.size) | costs))
    return rows


async def run() -> list[Row]:
    """All series."""
    return [row for series in SERIES for row in await measure(series)]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    return finish("scale", asyncio.run(run()), json_to=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
