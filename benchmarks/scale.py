"""Whether a token, a claim and a submit cost the store the same however large the fleet is.

    python -m benchmarks.scale [--json FILE]

Starts a Valkey of its own, with an append-only file. Workers are made up: each owns some streams
and writes one step after the other, one token a stream, by the real scripts. Three series: more
workers of 16 streams each, more open streams at the same 16 a step, more shards. Figures are
microseconds of the server's CPU, the median of several batches, and their ratio to the first row of
the series.
"""

import argparse
import asyncio
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.ports import free_port
from tests.support.store import start_valkey

from benchmarks.support.processes import AS_EMBEDDED
from benchmarks.support.report import Row, finish
from millstream.shared.connection import open_redis
from millstream.shared.keys import Keys
from millstream.shared.schemas import new_task_id
from millstream.shared.script_runner import script_text
from millstream.shared.scripts import Scripts
from millstream.shared.steps import AppendRow

STEP = 16  # streams a worker writes in one call
CALLS = 400  # of each kind, in batches
BATCHES = 8
REQUEST = b'{"model": "m", "messages": [{"role": "user", "content": "' + b"x" * 400 + b'"}]}'


@dataclass(frozen=True)
class Size:
    """How large the fleet of a row is."""

    workers: int
    streams: int
    shards: int


@dataclass
class Cost:
    """CPU microseconds of the store."""

    submit_us: float
    claim_us: float
    token_us: float


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

    async def cost(self, call: Any, calls: int) -> float:
        """The store's CPU microseconds a call."""
        costs: list[float] = []
        for batch in range(BATCHES):
            before = await self._cpu_s()
            for number in range(calls // BATCHES):
                await call(batch * (calls // BATCHES) + number)
            costs.append((await self._cpu_s() - before) / (calls // BATCHES))
        return 1e6 * statistics.median(costs)

    async def _cpu_s(self) -> float:
        info = await self.client.info("cpu")
        return info["used_cpu_user"] + info["used_cpu_sys"]

    async def measure(self) -> Cost:
        """Fill the fleet, then measure."""
        await self.client.flushdb()
        for number in range(self.size.streams):
            await self.submit(number)
        for number in range(self.size.streams):
            await self.claim(number)
        submit = await self.cost(self.submit, CALLS)
        claim = await self.cost(self.claim, CALLS)
        return Cost(submit, claim, await self.cost(self.step, 4 * CALLS) / STEP)


async def run() -> list[Row]:
    """All series."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        server = start_valkey(port, Path(folder), *AS_EMBEDDED)
        try:
            async with open_redis(f"redis://127.0.0.1:{port}/0") as client:
                for name in ("submit", "claim", "append"):
                    await client.script_load(script_text(name))
                for series, sizes in SERIES.items():
                    base = 0.0
                    for size in sizes:
                        cost = await Fleet(client, size).measure()
                        base = base or cost.token_us
                        figures = asdict(size) | asdict(cost) | {"ratio": cost.token_us / base}
                        rows.append(Row("millstream", series, figures))
        finally:
            server.kill()
            server.wait(10)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    return finish("scale", asyncio.run(run()), json_to=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
