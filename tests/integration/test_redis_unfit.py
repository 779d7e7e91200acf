"""A Redis in which tasks are not safe is refused; one that is away is waited for."""

import asyncio
import signal

import httpx
import pytest
from tests.support.local_fleet import LocalFleet
from tests.support.native import read, submit
from tests.support.store import Store
from tests.support.waiting import eventually


@pytest.mark.parametrize("kind", ["api", "worker"])
async def test_a_redis_that_evicts_is_refused(frail: LocalFleet, store: Store, kind: str) -> None:
    store.configure("maxmemory-policy", "allkeys-lru")
    process = frail.start_api() if kind == "api" else await frail.worker(ready=False)
    assert await process.ended() == 1
    (line,) = process.text().splitlines()
    assert line.startswith(f"millstream: {store.url}: maxmemory-policy is allkeys-lru")
    assert "CONFIG SET maxmemory-policy noeviction" in line


async def test_a_redis_that_is_away_is_waited_for(frail: LocalFleet, store: Store) -> None:
    store.end()
    api = await frail.api()
    await frail.worker(ready=False)
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        answer = await http.post("/tasks", json={"prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        store.start()

        async def ready() -> bool:
            return (await http.get("/ready")).status_code == 200

        await eventually(ready, within_s=15, what="the fleet to be ready")
        assert (await read(http, await submit(http, tokens=3)))[-1].event == "completed"


async def test_a_redis_that_comes_up_unfit_ends_those_that_waited(
    frail: LocalFleet, store: Store
) -> None:
    store.end()
    waiting = [await frail.api(), await frail.worker(ready=False)]

    async def waits() -> bool:
        return all("waiting for Redis at" in process.text() for process in waiting)

    await eventually(waits, what="both to wait")
    store.start("--maxmemory-policy", "volatile-ttl")
    assert await asyncio.gather(*(process.ended(15) for process in waiting)) == [1, 1]
    for process in waiting:
        assert "maxmemory-policy is volatile-ttl" in process.text()
        assert "Traceback" not in process.text()


async def _keys(fleet: LocalFleet) -> set[bytes]:
    """All keys, but the marks of requests that were withdrawn."""
    return {key async for key in fleet.redis.scan_iter("*") if b":tomb:" not in key}


async def test_full_memory_is_refused_and_gone_on_from(frail: LocalFleet, store: Store) -> None:
    """F13: the pod is not ready while Redis takes no writes, and no task is made by half."""
    api = await frail.api(keepalive_s=0.5)
    await frail.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        task_id = await submit(http, tokens=60, rate=40)

        async def some() -> bool:
            return await frail.redis.xlen(f"{{ms:0}}:log:{task_id}") >= 10

        await eventually(some, what="ten tokens")
        reading = asyncio.create_task(read(http, task_id))
        store.configure("maxmemory", 1)
        keys = await _keys(frail)
        held = await frail.redis.xlen(f"{{ms:0}}:log:{task_id}")
        ready, posted = await asyncio.gather(
            http.get("/ready"), http.post("/tasks", json={"prompt": "x"})
        )
        for answer in (ready, posted):
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            error = answer.json()["error"]
            assert error["code"] == "redis_unavailable"
            assert error["message"] == "The fleet's store is full; try again."
        assert (await http.get("/health")).status_code == 200
        # What was asked to end ends: to let go needs no memory to speak of.
        assert await _keys(frail) == keys

        async def generated() -> bool:
            return (await frail.workers())[0].tokens_per_s == 0  # all 60, and none written

        await eventually(generated, what="the generation to be over")
        assert await frail.redis.xlen(f"{{ms:0}}:log:{task_id}") == held < 60
        store.configure("maxmemory", 0)

        async def is_ready() -> bool:
            return (await http.get("/ready")).status_code == 200

        await eventually(is_ready, what="the pod to be ready again")
        frames = [frame for frame in await reading if frame.event != "queued"]
        assert [int(frame.id or 0) for frame in frames] == list(range(1, 62))
        assert frames[-1].event == "completed"
        assert (await http.get(f"/tasks/{task_id}")).json()["attempts"] == 1
    await frail.quiet()


@pytest.mark.parametrize("how", ["entry", "queue"])
@pytest.mark.parametrize("read_by", ["nobody", "who came before", "who comes later"])
async def test_a_task_whose_queue_entry_was_deleted_is_still_run(
    frail: LocalFleet, how: str, read_by: str
) -> None:
    """B13: its worker dies with it, and whether anybody looks at the task makes no difference."""
    api = await frail.api(keepalive_s=0.5)
    worker = await frail.worker(lease_s=1)
    queue = "{ms:0}:queue:fake"
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        expected = await read(http, await submit(http, tokens=20, rate=40))
        task_id = await submit(http, tokens=20, rate=40)
        if read_by == "who came before":
            reading = asyncio.create_task(read(http, task_id))

        async def some() -> bool:
            return await frail.redis.xlen(f"{{ms:0}}:log:{task_id}") >= 5

        await eventually(some, what="five tokens")
        worker.signal(signal.SIGKILL)
        await worker.ended()
        assert await frail.redis.xlen(queue) == 1
        deleted = (
            frail.redis.xtrim(queue, maxlen=0) if how == "entry" else frail.redis.delete(queue)
        )
        assert await deleted == 1
        await frail.worker(lease_s=1)
        if read_by == "who comes later":
            reading = asyncio.create_task(read(http, task_id))

        async def completed() -> bool:
            return await frail.redis.hget(f"{{ms:0}}:task:{task_id}", "state") == b"completed"

        # Two leases and sweeps: none of the pod's looks, 15 s apart, has to find it.
        await eventually(completed, within_s=10, what="the other worker")
        frames = await (read(http, task_id) if read_by == "nobody" else reading)
        assert [(f.id, f.data) for f in frames] == [(f.id, f.data) for f in expected]
        assert (await http.get(f"/tasks/{task_id}")).json()["attempts"] == 2
    await frail.quiet()
