"""JSON logs of real processes: who and what they are about, and few of them in a fault."""

import asyncio
import json
import signal
from collections import Counter
from typing import Any

import httpx
from tests.support.exposition import scrape
from tests.support.local_fleet import LocalFleet, Process
from tests.support.native import read, submit
from tests.support.store import Store
from tests.support.waiting import eventually

from millstream.shared.keys import Keys


def lines_of(process: Process) -> list[dict[str, Any]]:
    """Each of them is one JSON object."""
    return [json.loads(line) for line in process.text().splitlines()]


def check_few(process: Process) -> None:
    """At most ten lines of one kind in any second."""
    kinds = Counter(
        (line["time"][:19], line["logger"], line["level"]) for line in lines_of(process)
    )
    assert max(kinds.values()) <= 20, kinds  # a second by the clock may hold two windows' ends


async def test_few_lines_while_redis_is_away(frail: LocalFleet, store: Store) -> None:
    api, worker = await asyncio.gather(
        frail.api(log_format="json"), frail.worker(log_format="json")
    )
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        task_ids = [await submit(http, tokens=200, rate=40) for _ in range(8)]
        reading = [asyncio.create_task(read(http, task_id)) for task_id in task_ids]

        async def streaming() -> bool:
            return (await scrape(api.url)).value("streams_open") == len(task_ids)

        await eventually(streaming, what="all streams")
        store.end(signal.SIGKILL)
        statuses: Counter[int] = Counter()
        async with asyncio.timeout(20):
            for _ in range(4):
                asked = [http.post("/tasks", json={"prompt": "x"}) for _ in range(25)]
                statuses.update([answer.status_code for answer in await asyncio.gather(*asked)])
        assert set(statuses) == {503}
        store.start()
        for task in reading:
            await asyncio.wait_for(task, 25)
    for process in (api, worker):
        check_few(process)
        assert not any("Traceback" in line.get("exception", "") for line in lines_of(process))
    assert all("pod_id" in line for line in lines_of(api)[-1:])
    assert any("worker_id" in line for line in lines_of(worker))


async def test_a_takeover_is_told_with_task_and_worker(fleet: LocalFleet) -> None:
    api, first = await asyncio.gather(fleet.api(), fleet.worker(log_format="json"))
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        task_id = await submit(http, tokens=20, delay_at=[11], delay_s=60)

        async def written() -> bool:
            return (await fleet.scripts.task_fields(Keys(0), task_id)).get("tokens") == "10"

        await eventually(written, what="10 tokens")
        second = await fleet.worker(log_format="json")
        first.signal(signal.SIGTERM)
        await read(http, task_id)
        (line,) = [line for line in lines_of(second) if "took over" in line["message"]]
        assert (line["task_id"], line["attempt"]) == (task_id, 2)
        ids = {info.id for info in await fleet.workers()}
        assert line["worker_id"] in ids
        assert line["message"] == "took over a task after 10 tokens"
    await fleet.quiet()
