"""Links to Redis that go silent without a word: of one worker (F16), and of a pod."""

import asyncio
import time

import httpx
from tests.support import sse
from tests.support.local_fleet import LEASE_S, LocalFleet
from tests.support.native import read, submit
from tests.support.store import Store
from tests.support.waiting import eventually

from millstream.fleet.chaos.link import Link


async def test_black_holes(store: Store, frail: LocalFleet) -> None:
    async with Link(store.socket) as far, Link(store.socket) as near:
        pod = await frail.api(keepalive_s=0.5, redis_url=far.url)
        cut = await frail.worker(redis_url=near.url)
        async with httpx.AsyncClient(base_url=pod.url, timeout=25) as http:
            expected = sse.native_text(await read(http, await submit(http, tokens=100, rate=25)))
            task_id = await submit(http, tokens=100, rate=25)
            reading = asyncio.create_task(read(http, task_id))

            async def some() -> bool:
                return await frail.redis.xlen(f"{{ms:0}}:log:{task_id}") >= 10

            await eventually(some, what="ten tokens")
            await frail.worker()
            near.silence()
            far.silence()
            began = time.monotonic()
            refused = await http.post("/tasks", json={"prompt": "x"})
            assert time.monotonic() - began < 6
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            far.heal()

            async def taken_over() -> bool:
                fields = await frail.redis.hget(f"{{ms:0}}:task:{task_id}", "attempt")
                return fields == b"2"

            await eventually(taken_over, within_s=3 * LEASE_S, what="the other worker")
            near.heal()
            frames = await reading
            sse.check_native([frame for frame in frames if frame.event != "queued"])
            assert sse.native_text(frames) == expected

            async def dropped() -> bool:
                workers = {info.pid: info for info in await frail.workers()}
                return cut.pid in workers and workers[cut.pid].running == 0

            await eventually(dropped, what="the cut worker to drop the task")
            assert (await http.get(f"/tasks/{task_id}")).json()["attempts"] == 2
    await frail.quiet()
