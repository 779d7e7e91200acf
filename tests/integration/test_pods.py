"""Pods that die or are told to go: readers go on elsewhere, and nothing is called finished."""

import asyncio
import json
import signal
from contextlib import suppress

import httpx
import pytest
from tests.support import sse
from tests.support.local_fleet import LocalFleet, within
from tests.support.native import read, submit
from tests.support.waiting import eventually

from millstream.shared.cancellation import cancel_until_done


async def test_sigterm_of_a_pod_sends_native_readers_on_and_lets_chats_finish(
    fleet: LocalFleet,
) -> None:
    first, second = await asyncio.gather(fleet.api(drain_s=8), fleet.api())
    await fleet.worker()
    async with (
        httpx.AsyncClient(base_url=first.url, timeout=20) as one,
        httpx.AsyncClient(base_url=second.url, timeout=20) as two,
    ):
        task_id = await submit(one, tokens=60, rate=20)
        native = asyncio.create_task(one.get(f"/tasks/{task_id}/stream"))
        directive = json.dumps({"tokens": 40, "rate": 20})
        body = {"messages": [{"role": "user", "content": f"@fake {directive}"}], "stream": True}
        chat = asyncio.create_task(one.post("/v1/chat/completions", json=body))

        async def both_run() -> bool:
            return sum(worker.running for worker in await fleet.workers()) == 2

        await eventually(both_run, what="two running tasks")
        first.signal(signal.SIGTERM)
        left = (await native).text
        assert left.endswith("retry: 500\n\n")
        seen = [frame for frame in sse.parse(left) if frame.event == "token"]
        rest = await read(two, task_id, len(seen))
        sse.check_native(seen + rest)
        assert len(seen + rest) == 61
        assert len(sse.chat_text(sse.parse((await chat).text)).split()) == 40
        assert await first.ended() == 0


async def test_a_chat_cut_by_a_closing_pod_is_an_error_and_stops_its_task(
    fleet: LocalFleet,
) -> None:
    api = await fleet.api(drain_s=3)
    await fleet.worker()
    directive = json.dumps({"tokens": 1000, "rate": 10})
    body = {"messages": [{"role": "user", "content": f"@fake {directive}"}]}
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        chat = asyncio.create_task(http.post("/v1/chat/completions", json={**body, "stream": True}))
        whole = asyncio.create_task(http.post("/v1/chat/completions", json=body))

        async def both_run() -> bool:
            return sum(worker.running for worker in await fleet.workers()) == 2

        await eventually(both_run, what="two running tasks")
        api.signal(signal.SIGTERM)
        frames = sse.parse((await chat).text)
        assert frames[-1].json["error"]["code"] == "server_closing"
        assert all('"finish_reason":"' not in frame.data for frame in frames)
        answer = await whole
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
    assert await api.ended() == 0
    await fleet.quiet()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_a_pod_at_once_and_with_an_answer_to_all(
    fleet: LocalFleet, second: signal.Signals
) -> None:
    """Whole answers got a plain 500, and the log a traceback for each."""
    api = await fleet.api(drain_s=25)
    await fleet.worker(max_concurrent=4)
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        asked: list[asyncio.Task[httpx.Response]] = []
        for rate in (5, 300):  # standing between tokens, and never
            directive = json.dumps({"tokens": 100_000, "rate": rate})
            body = {"messages": [{"role": "user", "content": f"@fake {directive}"}]}
            for stream in (False, True):
                post = http.post("/v1/chat/completions", json={**body, "stream": stream})
                asked.append(asyncio.create_task(post))

        async def all_run() -> bool:
            return sum(worker.running for worker in await fleet.workers()) == len(asked)

        await eventually(all_run, what="running tasks")
        api.signal(signal.SIGTERM)

        async def leaving() -> bool:
            return (await http.get("/ready")).status_code == 503

        await eventually(leaving, what="the pod to know that it goes")
        api.signal(second)
        answers = await within(15, asyncio.gather(*asked))
    for answer in answers:
        if answer.headers["content-type"] == "application/json":
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "server_closing"
        else:
            last = sse.parse(answer.text)[-1]
            assert last.json["error"]["code"] == "server_closing"
    assert await api.ended() == 0
    assert "Traceback" not in api.text()
    await fleet.quiet()


async def test_many_aborted_streams_leave_nothing(fleet: LocalFleet) -> None:
    api = await fleet.api()
    await fleet.worker()
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=api.url, timeout=20, limits=limits) as http:
        task_id = await submit(http, tokens=100_000, rate=5)

        async def abort() -> None:
            async with http.stream("GET", f"/tasks/{task_id}/stream") as answer:
                async for frame in sse.frames(answer.aiter_lines()):
                    if frame.event == "token":
                        return

        before = (await fleet.redis.info("clients"))["connected_clients"]
        await asyncio.gather(*(abort() for _ in range(100)))

        async def followed() -> bool:
            fields = await fleet.scripts.task_fields(keys(task_id), task_id)
            return fields["followers"] != ""

        async def unfollowed() -> bool:
            return not await followed()

        await eventually(unfollowed, what="the pod to stop following")
        after = (await fleet.redis.info("clients"))["connected_clients"]
        assert after - before < 32
        assert "Traceback" not in api.text()
        assert "never retrieved" not in api.text()
        await http.post(f"/tasks/{task_id}/stop")
    await fleet.quiet()


async def test_a_crowd_that_reads_a_long_log_holds_up_nothing_else(fleet: LocalFleet) -> None:
    """Twenty readers had all connections to Redis to themselves: all else was a 503."""
    api = await fleet.api()
    await fleet.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        long = await submit(http, tokens=2000, rate=0)

        async def ended() -> bool:
            return (await http.get(f"/tasks/{long}")).json()["status"] == "completed"

        await eventually(ended, what="a long log")
        waiting = await submit(http, tokens=100_000, rate=5)
        read_once = asyncio.Event()

        async def read_on() -> None:
            """Bytes alone: a client that decodes is slower than the pod."""
            host, port = api.url.removeprefix("http://").split(":")
            request = f"GET /tasks/{long}/stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            while True:
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write(request.encode())
                    while await reader.read(1 << 20):
                        pass
                    read_once.set()
                finally:
                    writer.transport.abort()
                    with suppress(OSError):
                        await writer.wait_closed()

        crowd = [asyncio.create_task(read_on()) for _ in range(24)]
        try:
            await within(20, read_once.wait())
            for _ in range(3):
                await submit(http, tokens=1)
                assert (await http.get("/ready")).status_code == 200
            assert (await http.post(f"/tasks/{waiting}/stop")).json()["status"] == "cancelled"
            assert (await read(http, await submit(http, tokens=3)))[-1].event == "completed"
        finally:
            await cancel_until_done(crowd)
    await fleet.quiet()


def keys(task_id: str):
    from millstream.shared.keys import Keys
    from millstream.shared.schemas import shard_of

    return Keys(shard_of(task_id) or 0)
