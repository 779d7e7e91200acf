"""`GET /usage`: the sum of what the tasks say, whatever became of their workers."""

import asyncio
import signal
from collections import Counter
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from tests.support.local_fleet import LocalFleet
from tests.support.native import read, submit
from tests.support.waiting import eventually


async def test_usage_is_the_sum_of_the_tasks(fleet: LocalFleet) -> None:
    api, other = await asyncio.gather(fleet.api(shards=2), fleet.api(shards=2))
    workers = [await fleet.worker(shards=2, max_concurrent=4, max_attempts=2) for _ in range(2)]
    async with (
        httpx.AsyncClient(base_url=api.url, timeout=25) as http,
        httpx.AsyncClient(base_url=other.url, timeout=25) as elsewhere,
    ):
        assert (await http.get("/usage")).json()["data"] == []
        moving = [await submit(http, tokens=60 + n, rate=40) for n in range(6)]
        stopped = await submit(http, tokens=10_000, rate=40)
        waiting = [await submit(http, tokens=10_000, rate=1) for _ in range(3)]
        poison = await submit(elsewhere, tokens=9, error_at=5)

        async def begun() -> bool:
            looks = [(await http.get(f"/tasks/{task_id}")).json() for task_id in moving]
            return all(look["usage"]["completion_tokens"] >= 5 for look in looks)

        await eventually(begun, what="tokens of each task")
        workers[0].signal(signal.SIGKILL)
        await fleet.worker(shards=2, max_concurrent=4, max_attempts=2)
        workers[1].signal(signal.SIGTERM)
        for task_id in (stopped, *waiting):
            await http.post(f"/tasks/{task_id}/stop")
        key = {"Idempotency-Key": "once"}
        body = {"prompt": '@fake {"tokens": 3}\nhello'}
        for pod in (http, elsewhere, http):
            again = (await pod.post("/tasks", json=body, headers=key)).json()["task_id"]

        tasks = [*moving, stopped, *waiting, poison, again]
        ends = await asyncio.gather(*(read(http, task_id) for task_id in tasks))
        assert [frames[-1].event for frames in ends] == [
            *(["completed"] * 6), *(["cancelled"] * 4), "failed", "completed",
        ]  # fmt: skip
        total: Counter[str] = Counter()
        for task_id in tasks:
            total.update((await http.get(f"/tasks/{task_id}")).json()["usage"])
        month = {"from": str(datetime.now(UTC).date() - timedelta(days=30))}
        for pod, more in ((http, {}), (elsewhere, {"caller": "*"})):
            rows = (await pod.get("/usage", params={**month, **more})).json()["data"]
            assert {(row["caller"], row["model"]) for row in rows} == {("anonymous", "fake")}
            counted = Counter[str]()
            for row in rows:  # two, if a day began meanwhile
                counted.update({name: row[name] for name in ("tasks", *total)})
            assert counted == {"tasks": 12, **total}
    await fleet.quiet()


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("from=yesterday", "from"),
        ("to=2026-02-30", "to"),
        ("from=2026-02-02&to=2026-02-01", "from"),
        ("from=2025-01-01&to=2026-02-01", "from"),
        ("from=0001-01-01&to=9999-12-31", "from"),
    ],
)
async def test_bad_days_are_named(shared_fleet: LocalFleet, query: str, param: str) -> None:
    async with httpx.AsyncClient(base_url=shared_fleet.url) as http:
        answer = await http.get(f"/usage?{query}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
