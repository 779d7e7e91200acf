"""What clients of Redis are known to get wrong: cancelled calls, dead connections, full pools."""

import asyncio
import json
import random
import re
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from tests.support import sse
from tests.support.faults import busy
from tests.support.link import Way
from tests.support.local_fleet import LocalFleet
from tests.support.native import read, submit
from tests.support.store import Store
from tests.support.waiting import eventually

from millstream.api.pod import LOG_READS
from millstream.fleet.chaos.link import Link
from millstream.shared.connection import POOL_SIZE, SOCKET_TIMEOUT_S, open_redis


async def test_cancelled_calls_cross_nothing_and_leave_nothing(
    frail: LocalFleet, link: Link
) -> None:
    """Requests that are aborted while Redis answers: B1 (redis-py#2624), B2 (#4121), B3 (#2717)."""
    api = await frail.api(redis_url=link.url)
    await frail.worker()
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=api.url, timeout=20, limits=limits) as http:
        canaries: dict[str, str] = {}
        for name in ("anna", "berta"):
            task_id = await submit(http, f"canary{name}", echo=True)
            await read(http, task_id)
            canaries[task_id] = f"canary{name}"
        link.slow_down(0.05)
        choose = random.Random(1)
        heard: Counter[str] = Counter()
        aborted: Counter[str] = Counter()

        async def ask(kind: str, task_id: str) -> None:
            own = canaries[task_id]
            match kind:
                case "get":
                    text = (await http.get(f"/tasks/{task_id}")).text
                case "stream":
                    text = (await http.get(f"/tasks/{task_id}/stream")).text
                case _:
                    message = {"role": "user", "content": f'@fake {{"echo": true}}\n{own}'}
                    body = {"messages": [message], "stream": kind == "chat stream"}
                    text = (await http.post("/v1/chat/completions", json=body)).text
            if '"code":"redis_unavailable"' in text:
                return  # too many at once for a busy machine, and told so
            assert set(re.findall(r"canary\w+", text)) == {own}, text
            heard[kind] += 1

        async def client(number: int) -> None:
            for turn in range(6):
                kind = ("get", "stream", "chat stream", "chat")[(number + turn // 2) % 4]
                # Every other one waits for its answer, however busy the machine.
                patience_s = choose.uniform(0, 0.3) if turn % 2 else 20
                try:
                    async with asyncio.timeout(patience_s):
                        await ask(kind, choose.choice(list(canaries)))
                except TimeoutError:
                    aborted[kind] += 1

        await asyncio.gather(*(client(number) for number in range(40)))
        link.heal()
        assert len(heard) == len(aborted) == 4
        assert aborted.total() > 30
        # Every connection still answers its own question, and none is lost to the pool.
        answers = await asyncio.gather(
            *(http.get(f"/tasks/{task_id}") for task_id in list(canaries) * 40)
        )
        for answer in answers:
            assert canaries[answer.json()["task_id"]] in answer.json()["text"]

    async def forgotten() -> bool:
        (pod,) = await frail.scripts.roster("{ms}:apis", ttl_s=60)
        return json.loads(pod)["streams"] == 0

    await eventually(forgotten, what="the end of all streams")
    assert link.connections <= POOL_SIZE + LOG_READS + 1
    for sign in ("Traceback", "never retrieved", "No connection"):
        assert sign not in api.text()


async def test_a_deaf_subscription_is_made_anew(frail: LocalFleet, link: Link, way: Way) -> None:
    """A black hole gives no error, only silence: B5 (redis-py#2417)."""
    api = await frail.api(redis_url=link.url)
    await frail.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        task_id = await submit(http, tokens=40, rate=20)
        frames: list[sse.Frame] = []
        async with http.stream("GET", f"/tasks/{task_id}/stream") as answer:
            async for frame in sse.frames(answer.aiter_lines()):
                if frame.event == "queued":
                    continue
                frames.append(frame)
                if len(frames) == 5:
                    assert link.connections >= 2
                    way.deafen()  # for good: they never heal
        sse.check_native(frames)
        assert len(frames) == 41
    assert "the subscription is deaf" in api.text()


async def test_a_deaf_worker_hears_again(frail: LocalFleet, link: Link, way: Way) -> None:
    """It looks for tasks itself meanwhile, but what it is told reaches it late."""
    worker = await frail.worker(redis_url=link.url)

    async def listeners() -> set[str]:
        clients = await frail.redis.client_list(_type="pubsub")
        return {client["id"] for client in clients}

    before = await eventually(listeners, what="a subscription")  # ready workers may have none yet
    assert len(before) == 1
    way.deafen()  # for good: it never heals

    async def anew() -> bool:
        return bool(await listeners() - before)

    await eventually(anew, within_s=25, what="another subscription")
    assert worker.text().count("the subscription is deaf") == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_an_idle_fleet_starts_a_task_at_once(shared_fleet: LocalFleet) -> None:
    """Reads that wait longer than a socket's timeout lose what comes then: B7 (redis-py#3138)."""
    logs = [process.text() for process in shared_fleet.processes]
    idle_since = time.monotonic()

    async def longer_than_the_timeout() -> bool:
        return time.monotonic() - idle_since > 2 * SOCKET_TIMEOUT_S

    await eventually(longer_than_the_timeout, what="an idle while")
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as http:
        task_id = await submit(http, tokens=2)
        sse.check_native(await read(http, task_id))
        task = (await http.get(f"/tasks/{task_id}")).json()
        assert task["started_at"] - task["created_at"] < 1
    assert [process.text() for process in shared_fleet.processes] == logs


async def test_a_full_pool_refuses_in_time(frail: LocalFleet, link: Link) -> None:
    """Whoever waits for a connection is told within 5 s: B9 (redis-py#3056)."""
    api = await frail.api(model="fake", redis_url=link.url)
    limits = httpx.Limits(max_connections=400)
    async with httpx.AsyncClient(base_url=api.url, timeout=20, limits=limits) as http:

        async def post() -> tuple[int, float]:
            began = time.monotonic()
            answer = await http.post("/tasks", json={"prompt": "x"})
            if answer.status_code == 503:
                assert int(answer.headers["retry-after"]) >= 1
            return answer.status_code, time.monotonic() - began

        warm = await asyncio.gather(*(post() for _ in range(2 * POOL_SIZE)))
        assert {status for status, _ in warm} == {202}
        link.slow_down(0.15)
        answers = await asyncio.gather(*(post() for _ in range(200)))
        statuses = Counter(status for status, _ in answers)
        assert set(statuses) == {202, 503}
        assert statuses[202] > POOL_SIZE
        assert max(seconds for _, seconds in answers) < 5 * busy()
        link.heal()
        assert (await http.post("/tasks", json={"prompt": "x"})).status_code == 202
        # More, if an answer was given up that came too late: that is what Idempotency-Key is for.
        assert await frail.redis.xlen("{ms:0}:queue:fake") > statuses[202] + len(warm)
    assert link.connections <= POOL_SIZE + LOG_READS + 1


async def test_a_demoted_master_is_left(tmp_path: Path) -> None:
    """Connections to what is now a replica answer READONLY for ever: B10 (redis-py#460)."""
    async with AsyncExitStack() as stack:
        stores = [Store(tmp_path / name) for name in ("old", "new")]
        for store in stores:
            stack.callback(store.end, signal.SIGKILL)
            store.configure("repl-diskless-sync-delay", 0)
        old, new = [await stack.enter_async_context(open_redis(store.url)) for store in stores]
        way = Way(stores[0].connect)
        link = await stack.enter_async_context(Link(way))
        fleet = await stack.enter_async_context(LocalFleet(link.url, tmp_path))
        api = await fleet.api()
        worker = await fleet.worker()
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=api.url, timeout=20))

        async def in_step() -> bool:
            return (await new.info("replication"))["master_link_status"] == "up"

        await new.replicaof("127.0.0.1", stores[0].port)
        await eventually(in_step, what="the replica")
        task_id = await submit(http, tokens=60, rate=20)
        running = asyncio.create_task(_completed(http, task_id))
        load = asyncio.create_task(_post_until(running, http))

        async def some_text() -> bool:
            return bool(await fleet.redis.xlen(f"{{ms:0}}:log:{task_id}"))

        await eventually(some_text, what="text")
        # The name leads to the new master from now on; who has a connection keeps it.
        await new.replicaof("NO", "ONE")
        way.connect = stores[1].connect
        await old.replicaof("127.0.0.1", stores[1].port)
        await running
        frames = await read(http, task_id)
        sse.check_native(frames)
        assert len([frame for frame in frames if frame.event == "token"]) == 60
        statuses = await load
        assert set(statuses) <= {202, 503}
        assert statuses[-5:] == [202] * 5
        assert "read only replica" in worker.text()  # who had a connection met the replica
        assert (await new.hget(f"{{ms:0}}:task:{task_id}", "state")) == b"completed"


async def _completed(http: httpx.AsyncClient, task_id: str) -> None:
    async def look() -> bool:
        answer = await http.get(f"/tasks/{task_id}")
        return answer.status_code == 200 and answer.json()["status"] == "completed"

    await eventually(look, within_s=20, what="the task's end")


async def _post_until(done: asyncio.Task[None], http: httpx.AsyncClient) -> list[int]:
    """Statuses of small tasks sent one after the other, until something is done."""
    statuses: list[int] = []
    while not done.done():
        answer = await http.post("/tasks", json={"prompt": '@fake {"tokens": 1}\nx'})
        statuses.append(answer.status_code)
        await asyncio.wait({done}, timeout=0.05)
    return statuses


@pytest.mark.asyncio(loop_scope="module")
async def test_forgotten_scripts_are_sent_again(shared_fleet: LocalFleet) -> None:
    """A restart, a failover, or somebody's SCRIPT FLUSH: B12 (redis-py#459)."""
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as http:
        task_ids = [await submit(http, tokens=40, rate=20) for _ in range(10)]
        reading = asyncio.gather(*(read(http, task_id) for task_id in task_ids))
        flushes = 0
        while not reading.done():
            await shared_fleet.redis.script_flush()
            flushes += 1
            await asyncio.wait({reading}, timeout=0.02)
        for frames in await reading:
            sse.check_native(frames)
            assert len([frame for frame in frames if frame.event == "token"]) == 40
    assert flushes > 20
    for process in shared_fleet.processes:
        assert "NOSCRIPT" not in process.text()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_deleted_queue_is_made_anew(shared_fleet: LocalFleet) -> None:
    """Its group is gone with it, whatever anyone remembers: B22 (jaseci/jac#7452)."""
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as http:
        await read(http, await submit(http, tokens=1))
        for _ in range(3):
            assert await shared_fleet.redis.delete("{ms:0}:queue:fake") == 1
            sse.check_native(await read(http, await submit(http, tokens=3)))
    for process in shared_fleet.processes:
        assert process.text().count("\n") < 10
    await shared_fleet.quiet()


async def test_three_resets_in_a_row_are_survived(frail: LocalFleet, link: Link) -> None:
    """A worker that is connected again and takes nothing: B28 (celery#8091)."""
    api = await frail.api()
    worker = await frail.worker(redis_url=link.url)
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        first = await submit(http, tokens=60, rate=20)
        reading = asyncio.create_task(read(http, first))
        cut = []
        for _ in range(3):

            async def connected() -> bool:
                return link.connections >= 2

            await eventually(connected, what="the worker's connections")
            cut.append(link.connections)
            link.reset()
        began = time.monotonic()
        sse.check_native(await read(http, await submit(http, tokens=1)))
        assert time.monotonic() - began < 5
        sse.check_native(await reading)
        assert (await http.get(f"/tasks/{first}")).json()["attempts"] == 1
        assert min(cut) >= 2
        assert worker.text().count("\n") < 20
    await frail.quiet()
