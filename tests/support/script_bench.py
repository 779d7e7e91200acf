"""The scripts with the arguments that matter to no test filled in."""

import asyncio
from typing import Any

from millstream.shared.events import Event
from millstream.shared.keys import Keys
from millstream.shared.schemas import new_task_id
from millstream.shared.scripts import Scripts
from millstream.shared.steps import (
    AppendRow,
    Claim,
    LogPage,
    Refused,
    StopAnswer,
    Submitted,
)

SHARD = Keys(0)
LEASE_S = 0.15
CALLED = 1_000_000
"""Is added to the load of a worker that was called and has not shown itself since."""


class Bench:
    """The scripts with the arguments that matter to no test filled in."""

    def __init__(self, scripts: Scripts) -> None:
        self.scripts = scripts
        self.client: Any = scripts._client
        self.workers: dict[tuple[str, int], str] = {}

    async def submit(self, **changes: Any) -> Submitted | Refused:
        arguments = {
            "task_id": new_task_id(0),
            "model": "m",
            "caller": "ann",
            "request": b"{}",
            "max_queue": 10,
            "live_ttl_s": 100,
            **changes,
        }
        return await self.scripts.submit(Keys(int(arguments["task_id"][1])), **arguments)

    async def task(self, **changes: Any) -> str:
        answer = await self.submit(**changes)
        assert isinstance(answer, Submitted)
        return answer.task_id

    async def claim(self, worker: str, **changes: Any) -> list[Claim]:
        return (await self.claim_and_waiting(worker, **changes))[0]

    async def claim_and_waiting(self, worker: str, **changes: Any) -> tuple[list[Claim], int]:
        arguments = {
            "model": "m",
            "free": 10,
            "running": 0,
            "lease_s": LEASE_S,
            "max_attempts": 3,
            "live_ttl_s": 100,
            "result_ttl_s": 10,
            "max_task_s": 60,
            "sweep": True,
            **changes,
        }
        claims, waiting = await self.scripts.claim(SHARD, worker=worker, **arguments)
        self.workers |= {(claim.task_id, claim.attempt): worker for claim in claims}
        return claims, waiting

    async def append(self, *rows: AppendRow) -> list[int]:
        worker = self.workers[rows[0].task_id, rows[0].attempt]
        return await self.scripts.append(
            SHARD, worker=worker, model="m", result_ttl_s=10, rows=rows
        )

    async def restore(self, task_id: str, *events: Event) -> str:
        return await self.scripts.restore(SHARD, task_id=task_id, result_ttl_s=10, events=events)

    async def memory(self) -> dict[bytes, bytes]:
        """All that Redis holds."""
        return {key: await self.client.dump(key) async for key in self.client.scan_iter()}

    async def go_back(self, memory: dict[bytes, bytes]) -> None:
        """Lose all that was written since."""
        await self.client.flushdb()
        for key, value in memory.items():
            await self.client.restore(key, 100_000, value)

    async def log(self, task_id: str, after: int = 0) -> list[Event]:
        page = await self.scripts.follow(
            SHARD, task_id=task_id, caller="ann", pod="", after=after, count=1000
        )
        assert isinstance(page, LogPage)
        return page.events

    async def state(self, task_id: str) -> str:
        return (await self.scripts.task_fields(Keys(int(task_id[1])), task_id))["state"]

    async def stop(self, task_id: str, caller: str = "ann") -> StopAnswer:
        return await self.scripts.stop(SHARD, task_id=task_id, caller=caller, result_ttl_s=10)

    async def renew(self, worker: str, claim: Claim) -> int:
        (answer,) = await self.scripts.renew(
            SHARD, worker=worker, model="m", live_ttl_s=100, result_ttl_s=10,
            tasks=[(claim.task_id, claim.attempt)],
        )  # fmt: skip
        return answer

    async def lapse(self) -> None:
        """Let the lease of what is claimed lapse."""
        queue = SHARD.queue("m")
        while True:
            rows = await self.client.xpending_range(queue, "workers", "-", "+", 100)
            if all(row["time_since_delivered"] > LEASE_S * 1000 for row in rows):
                return
            await asyncio.sleep(0.01)

    async def pass_deadline(self, task_id: str) -> None:
        """Let a task be one that was to end within 2.5 s of long ago."""
        times = {"created": 1000, "deadline": 3500}
        await self.client.hset(SHARD.task(task_id), mapping=times)
        await self.client.zadd(SHARD.due(), {task_id: times["deadline"]})

    async def idle(self) -> dict[bytes, float]:
        """Workers with free slots, and their loads."""
        return dict(await self.client.zrange(SHARD.idle("m"), 0, -1, withscores=True))

    async def queue_length(self) -> int:
        return await self.client.xlen(SHARD.queue("m"))


def row(task: Claim, first: int, *texts: str, outcome: str = "", detail: str = "") -> AppendRow:
    events = [(str(100 + first + n), f'"{text}"') for n, text in enumerate(texts)]
    return AppendRow(task.task_id, task.attempt, 5, first, events, outcome, detail)
