"""What a submit, a claim and an append cost the store, by depth of the queue and number of callers.

    python -m benchmarks.queue_cost [--json FILE]

Starts a Valkey of its own. Figures are microseconds of the server's CPU a call, all of it: reading
the command, the script, and the answer. Each is the least of several batches, for machines that
other things run on.
"""

import argparse
import asyncio
import contextlib
from typing import Any

from benchmarks.support.processes import valkey
from benchmarks.support.report import Row, finish
from millstream.shared.connection import open_redis
from millstream.shared.keys import Keys
from millstream.shared.schemas import new_task_id
from millstream.shared.script_runner import script_hash, script_text
from millstream.shared.scripts import Scripts
from millstream.shared.steps import AppendRow

SHARD = Keys(0)
CALLS = 400
AT_ONCE = 50  # calls sent together, so that the server's sockets and scheduler weigh little
QUEUES = ((0, 1), (1000, 1), (1000, 100), (10_000, 1), (10_000, 10_000))  # waiting, callers
STEP = 32  # tasks of one append
FIGURES = ("submit_us", "claim_us", "token_us", "end_us")
REQUEST = b'{"model": "m", "messages": [{"role": "user", "content": "' + b"x" * 400 + b'"}]}'


class Bench:
    """One server and the calls that are measured."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.number = 0
        self.queued: list[tuple[str, list[str], list[Any]]] = []
        self.scripts = Scripts(client)
        self.scripts._run = self._collect  # sent in batches, not one by one

    async def _collect(self, name: str, keys: list[str], args: list[Any]) -> Any:
        self.queued.append((name, keys, args))
        raise StopAsyncIteration

    async def send(self) -> tuple[list[Any], float]:
        """What the calls answer, and the CPU seconds of the cheapest batch a call."""
        answers: list[Any] = []
        costs: list[float] = []
        while self.queued:
            batch, self.queued = self.queued[:AT_ONCE], self.queued[AT_ONCE:]
            async with self.client.pipeline(transaction=False) as pipe:
                pipe.info("cpu")
                for name, keys, args in batch:
                    pipe.evalsha(script_hash(name), len(keys), *keys, *args)
                pipe.info("cpu")
                before, *part, after = await pipe.execute()
            answers += part
            spent = [info["used_cpu_user"] + info["used_cpu_sys"] for info in (before, after)]
            costs.append((spent[1] - spent[0]) / len(batch))
        return answers, min(costs)

    async def submit(self, callers: int) -> None:
        """One more task, of the next caller."""
        self.number += 1
        with contextlib.suppress(StopAsyncIteration):
            await self.scripts.submit(
                SHARD, task_id=new_task_id(0), model="m", caller=f"caller {self.number % callers}",
                request=REQUEST, max_queue=10**6, live_ttl_s=3600,
            )  # fmt: skip

    async def claim(self) -> None:
        """One task, as a worker with one free slot gets it."""
        with contextlib.suppress(StopAsyncIteration):
            await self.scripts.claim(
                SHARD, worker="w", model="m", free=1, running=0, lease_s=600, max_attempts=3,
                live_ttl_s=3600, result_ttl_s=60, max_task_s=3600, sweep=False,
            )  # fmt: skip

    async def append(self, task_ids: list[str], first: int, outcome: str) -> None:
        """One decode step."""
        rows = [
            AppendRow(task_id, 1, 100, first, [("7", '" x"')], outcome, "stop")
            for task_id in task_ids
        ]
        with contextlib.suppress(StopAsyncIteration):
            await self.scripts.append(SHARD, worker="w", model="m", result_ttl_s=60, rows=rows)

    async def measure(self, depth: int, callers: int) -> list[float]:
        """CPU microseconds of a submit, of a claim, and of an append by row: tokens, then ends."""
        await self.client.flushdb()
        for _ in range(depth):
            await self.submit(callers)
        if depth:
            await self.send()
        for _ in range(CALLS):
            await self.submit(callers)
        _, submit_s = await self.send()
        for _ in range(CALLS):
            await self.claim()
        claims, claim_s = await self.send()
        task_ids = [row[0].decode() for rows, _ in claims for row in rows]
        steps = [task_ids[at : at + STEP] for at in range(0, len(task_ids) - STEP, STEP)]
        for first in range(1, 41):
            for step in steps:
                await self.append(step, first, "")
        _, token_s = await self.send()
        for step in steps:
            await self.append(step, 41, "completed")
        _, end_s = await self.send()
        return [submit_s * 1e6, claim_s * 1e6, token_s / STEP * 1e6, end_s / STEP * 1e6]


async def run() -> list[Row]:
    """Each queue."""
    rows: list[Row] = []
    with valkey() as store:
        async with open_redis(store.url) as client:
            for name in ("submit", "claim", "append"):
                await client.script_load(script_text(name))
            bench = Bench(client)
            for depth, callers in QUEUES:
                costs = await bench.measure(depth, callers)
                figures = dict(zip(FIGURES, costs, strict=True))
                rows.append(Row("millstream", f"{depth} of {callers} callers wait", figures))
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    return finish("queue_cost", asyncio.run(run()), json_to=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
