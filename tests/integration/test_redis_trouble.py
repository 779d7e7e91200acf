"""Redis that is away, freezes, or loses all: refused early, waited for, gone on with.

A restart under load and lost subscriptions are in tests/faults.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import httpx
from tests.support import sse
from tests.support.faults import busy, held
from tests.support.local_fleet import LEASE_S, LocalFleet
from tests.support.native import read, submit
from tests.support.store import Store
from tests.support.waiting import eventually


def refused(answer: httpx.Response) -> bool:
    return answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1


async def test_an_outage_of_a_lease_moves_no_task(store: Store, frail: LocalFleet) -> None:
    api = await frail.api()
    await asyncio.gather(*(frail.worker() for _ in range(3)))
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        tasks = [await submit(http, tokens=200, rate=25) for _ in range(6)]
        async with http.stream("GET", f"/tasks/{tasks[-1]}/stream") as stream:
            frames = sse.frames(stream.aiter_lines())
            while (await anext(frames)).event == "queued":
                pass
        store.end()
        await asyncio.sleep(LEASE_S)  # the outage is the fault
        store.start()
        for task_id in tasks:
            assert len(await read(http, task_id)) == 201
            # All leases had lapsed; but their owners live, and go on.
            assert (await http.get(f"/tasks/{task_id}")).json()["attempts"] == 1


async def test_a_frozen_redis_is_refused_within_seconds_and_waited_for(
    store: Store, frail: LocalFleet
) -> None:
    api = await frail.api(keepalive_s=0.5)
    await frail.worker()
    limits = httpx.Limits(max_connections=60)
    async with httpx.AsyncClient(base_url=api.url, timeout=25, limits=limits) as http:
        expected = sse.native_text(await read(http, await submit(http, tokens=50, rate=25)))
        task_id = await submit(http, tokens=50, rate=25)
        frames: list[sse.Frame] = []
        async with http.stream("GET", f"/tasks/{task_id}/stream") as stream:
            async for frame in sse.frames(stream.aiter_lines()):
                if frame.event == "queued":
                    continue
                frames.append(frame)
                if len(frames) == 15:
                    store.send(signal.SIGSTOP)
                    began = time.monotonic()
                    answers = await asyncio.gather(
                        *(http.post("/tasks", json={"prompt": "x"}) for _ in range(50))
                    )
                    assert all(map(refused, answers))
                    assert time.monotonic() - began < 5 * busy()
                    store.send(signal.SIGCONT)
        sse.check_native(frames)
        assert sse.native_text(frames) == expected
        comments = [comment for frame in frames for comment in frame.comments]
        assert comments.count("ping") >= 2


async def test_what_was_refused_is_not_run_when_a_frozen_redis_thaws(
    store: Store, frail: LocalFleet
) -> None:
    """Redis takes up what lies in its sockets: who was told 503 and asked again had a double."""
    api = await frail.api()
    await frail.worker()
    limits = httpx.Limits(max_connections=60)
    async with httpx.AsyncClient(base_url=api.url, timeout=25, limits=limits) as http:
        # Connections that are made already: on others nothing is sent before Redis has answered.
        warm = await asyncio.gather(*(submit(http, tokens=1) for _ in range(12)))
        store.send(signal.SIGSTOP)
        prompt = '@fake {"tokens": 1000, "rate": 20}'
        chat = {"messages": [{"role": "user", "content": prompt}], "n": 2}
        answers = await asyncio.gather(
            *(http.post("/tasks", json={"prompt": prompt}) for _ in range(4)),
            *(http.post("/v1/chat/completions", json=chat) for _ in range(2)),
        )
        store.send(signal.SIGCONT)
        assert all(map(refused, answers))

        async def withdrawn() -> bool:
            tombs = [key async for key in frail.redis.scan_iter("*:tomb:*")]
            return len(tombs) == 4 + 2 * 2

        await eventually(withdrawn, what="all that was refused to be withdrawn")
        tasks = {key.split(b":")[-1].decode() async for key in frail.redis.scan_iter("*:task:*")}
        assert tasks == set(warm)
        assert (await read(http, await submit(http, tokens=3)))[-1].event == "completed"
    await frail.quiet()


async def test_all_data_gone_and_the_fleet_works_again(store: Store, frail: LocalFleet) -> None:
    api = await frail.api(keepalive_s=0.5)
    await frail.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        task_id = await submit(http, tokens=1000, rate=20)
        async with http.stream("GET", f"/tasks/{task_id}/stream") as stream:
            lines = [line async for line in _until_cut(stream, frail)]
        assert '"code":"task_lost"' in lines[-2]
        assert (await http.get(f"/tasks/{task_id}")).status_code == 404
        assert (await read(http, await submit(http, tokens=3)))[-1].event == "completed"
    await frail.quiet()


async def test_an_answer_whose_task_is_lost_is_the_server_s_fault(
    store: Store, frail: LocalFleet
) -> None:
    """Its client has named no task; a 404 would tell it that it had, and not to ask again."""
    api, _ = await asyncio.gather(frail.api(), frail.worker())
    chat = {"messages": [{"role": "user", "content": held(2, tokens=9)}]}
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        asking = [
            asyncio.create_task(http.post("/v1/chat/completions", json=chat)),
            asyncio.create_task(http.post("/v1/responses", json={"input": held(2, tokens=9)})),
            asyncio.create_task(http.post("/generate", json={"prompt": held(2, tokens=9)})),
            asyncio.create_task(http.post("/v1/chat/completions", json=chat | {"stream": True})),
        ]
        await eventually(lambda: running(frail, len(asking)), what="all to run")
        await frail.redis.flushall()
        await frail.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        *whole, streamed = await asyncio.gather(*asking)
    for answer in whole:
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "task_lost"
        assert answer.json()["error"]["type"] == "server_error"
    assert streamed.status_code == 200
    assert '"code":"task_lost"' in streamed.text
    assert "[DONE]" not in streamed.text
    await frail.quiet()


async def running(fleet: LocalFleet, count: int) -> bool:
    """Whether so many tasks have two tokens."""
    logs = [key async for key in fleet.redis.scan_iter("*:log:*")]
    return len(logs) == count and all([await fleet.redis.xlen(log) == 2 for log in logs])


async def _until_cut(stream: httpx.Response, frail: LocalFleet) -> AsyncIterator[str]:
    """Lines of a stream whose task vanishes after some of them."""
    count = 0
    async for line in stream.aiter_lines():
        count += 1
        if count == 20:
            await frail.redis.flushall()
            await frail.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        yield line
