"""Workers that die, freeze or are told to go: the text goes on and equals an undisturbed run."""

import asyncio
import json
import signal

import httpx
import pytest
from tests.support import sse
from tests.support.local_fleet import LEASE_S, LocalFleet
from tests.support.waiting import eventually

TOKENS, RATE = 60, 50


def prompt(**directive: object) -> str:
    return f"@fake {json.dumps({'tokens': TOKENS, 'rate': RATE, **directive})}\nonce upon a time"


async def reference(http: httpx.AsyncClient, **directive: object) -> str:
    """The text of an undisturbed run."""
    answer = await http.post("/tasks", json={"prompt": prompt(**directive)})
    task_id = answer.json()["task_id"]
    return sse.native_text(sse.parse((await http.get(f"/tasks/{task_id}/stream")).text))


@pytest.mark.parametrize("at", [1, 30, TOKENS])
async def test_kill_9_of_the_worker_does_not_end_the_stream(fleet: LocalFleet, at: int) -> None:
    api = await fleet.api(keepalive_s=0.5)
    await fleet.worker()
    await fleet.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        expected = await reference(http)
        task_id = (await http.post("/tasks", json={"prompt": prompt()})).json()["task_id"]
        frames: list[sse.Frame] = []
        async with http.stream("GET", f"/tasks/{task_id}/stream") as answer:
            async for frame in sse.frames(answer.aiter_lines()):
                if frame.event == "queued":
                    continue
                frames.append(frame)
                if len(frames) == at:
                    owner = await fleet.owner(task_id)
                    owner.signal(signal.SIGKILL)
        sse.check_native(frames)
        assert sse.native_text(frames) == expected
        assert len(frames) == TOKENS + 1
        task = (await http.get(f"/tasks/{task_id}")).json()
        if at < TOKENS:
            assert task["attempts"] == 2
        assert task["usage"]["completion_tokens"] == TOKENS
    await fleet.quiet()


async def test_kill_9_under_an_openai_stream(fleet: LocalFleet) -> None:
    api = await fleet.api(keepalive_s=0.5)
    await fleet.worker()
    await fleet.worker()
    body = {"messages": [{"role": "user", "content": prompt()}], "stream": True}
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        whole = await http.post("/v1/chat/completions", json={**body, "stream": False})
        frames: list[sse.Frame] = []
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for frame in sse.frames(answer.aiter_lines()):
                frames.append(frame)
                if len(frames) == 20:
                    owner = await fleet.owner(answer.headers["x-task-id"])
                    owner.signal(signal.SIGKILL)
        assert sse.chat_text(frames) == whole.json()["choices"][0]["message"]["content"]
        assert any("ping" in frame.comments for frame in frames)


async def test_a_frozen_worker_that_wakes_is_refused(fleet: LocalFleet) -> None:
    api = await fleet.api(keepalive_s=0.5)
    await fleet.worker()
    await fleet.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        expected = await reference(http)
        task_id = (await http.post("/tasks", json={"prompt": prompt()})).json()["task_id"]
        frames: list[sse.Frame] = []
        async with http.stream("GET", f"/tasks/{task_id}/stream") as answer:
            async for frame in sse.frames(answer.aiter_lines()):
                if frame.event == "queued":
                    continue
                frames.append(frame)
                if len(frames) == 10:
                    owner = await fleet.owner(task_id)
                    owner.signal(signal.SIGSTOP)
        assert sse.native_text(frames) == expected
        sse.check_native(frames)
        owner.signal(signal.SIGCONT)

        async def refused() -> bool:
            workers = {info.pid: info for info in await fleet.workers()}
            info = workers.get(owner.pid)
            return info is not None and info.running == 0

        await eventually(refused, what="the woken worker to drop the task")
        again = await http.get(f"/tasks/{task_id}/stream")
        assert sse.native_text(sse.parse(again.text)) == expected
        task = (await http.get(f"/tasks/{task_id}")).json()
        assert task["attempts"] == 2
    await fleet.quiet()


async def test_sigterm_hands_over_at_once(fleet: LocalFleet) -> None:
    api = await fleet.api(keepalive_s=0.5)
    first = await fleet.worker()
    slow = {"tokens": 40, "rate": 8}
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        expected = await reference(http, **slow)
        created = [await http.post("/tasks", json={"prompt": prompt(**slow)}) for _ in range(8)]
        task_ids = [answer.json()["task_id"] for answer in created]

        async def all_running() -> bool:
            return sum(worker.running for worker in await fleet.workers()) == 8

        await eventually(all_running, what="eight running tasks")
        await fleet.worker()
        gaps: list[float] = []

        async def read(task_id: str) -> str:
            loop = asyncio.get_running_loop()
            frames: list[sse.Frame] = []
            last = loop.time()
            async with http.stream("GET", f"/tasks/{task_id}/stream") as answer:
                async for frame in sse.frames(answer.aiter_lines()):
                    gaps.append(loop.time() - last)
                    last = loop.time()
                    frames.append(frame)
            sse.check_native(frames)
            return sse.native_text(frames)

        readers = [asyncio.create_task(read(task_id)) for task_id in task_ids]
        first.signal(signal.SIGTERM)
        assert await first.ended() == 0
        assert await asyncio.gather(*readers) == [expected] * 8
        assert max(gaps) < LEASE_S  # nobody waited for a lease
        tasks = [(await http.get(f"/tasks/{task_id}")).json() for task_id in task_ids]
        assert [task["attempts"] for task in tasks] == [2] * 8
    await fleet.quiet()


async def test_a_task_that_kills_its_worker_fails_by_itself(fleet: LocalFleet) -> None:
    api = await fleet.api(keepalive_s=0.5)
    settings = {"lease_s": 1}
    workers = await asyncio.gather(*(fleet.worker(**settings) for _ in range(3)))
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        poison = (await http.post("/tasks", json={"prompt": prompt(crash_at=3)})).json()["task_id"]
        reading = asyncio.create_task(http.get(f"/tasks/{poison}/stream"))
        assert [await worker.ended(15) for worker in workers] == [70] * 3
        # Only a living worker can find the third dead; it ends the task without running it.
        last = await fleet.worker(**settings)
        frames = [frame for frame in sse.parse((await reading).text) if frame.event != "queued"]
        sse.check_native(frames)
        assert [frame.event for frame in frames] == ["token", "token", "failed"]
        assert frames[-1].json["error"]["code"] == "max_attempts"
        assert (await http.get(f"/tasks/{poison}")).json()["attempts"] == 3
        good = await http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}
        )
        assert good.status_code == 200
        assert last.popen.poll() is None
    dead = await fleet.redis.xrange("{ms:0}:dead:fake")
    assert [fields[b"task"].decode() for _, fields in dead] == [poison]
    await fleet.quiet()


async def test_an_engine_that_hangs_loses_its_tasks(fleet: LocalFleet) -> None:
    api = await fleet.api(keepalive_s=0.5)
    hung = await fleet.worker(lease_s=1)
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        good = (await http.post("/tasks", json={"prompt": prompt(rate=10, tokens=20)})).json()
        bad = (await http.post("/tasks", json={"prompt": prompt(hang_at=4)})).json()
        assert await hung.ended() == 1
        stopped = await http.post(bad["stop_url"])
        assert stopped.json()["status"] == "cancelled"
        assert stopped.json()["usage"]["completion_tokens"] == 3
        await fleet.worker(lease_s=1)
        frames = sse.parse((await http.get(good["stream_url"])).text)
        frames = [frame for frame in frames if frame.event != "queued"]
        sse.check_native(frames)
        assert [frame.event for frame in frames].count("token") == 20
        assert (await http.get(f"/tasks/{good['task_id']}")).json()["attempts"] == 2
    await fleet.quiet()


async def test_an_engine_error_is_tried_again_and_then_told(fleet: LocalFleet) -> None:
    api = await fleet.api(keepalive_s=0.5)
    await fleet.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        body = {"messages": [{"role": "user", "content": prompt(error_at=4)}]}
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "max_attempts")
        streamed = await http.post("/v1/chat/completions", json={**body, "stream": True})
        frames = sse.parse(streamed.text)
        assert frames[-1].json["error"]["code"] == "max_attempts"
        assert all('finish_reason":"' not in frame.data for frame in frames)
    await fleet.quiet()


async def test_a_worker_killed_alone_is_replaced_by_a_later_one(fleet: LocalFleet) -> None:
    api = await fleet.api(keepalive_s=0.5)
    only = await fleet.worker(lease_s=1)
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        task = (
            await http.post(
                "/tasks", json={"prompt": prompt(bytes=["f0", "9f", "98", "80"], rate=4, tokens=4)}
            )
        ).json()

        async def two_tokens() -> bool:
            return await fleet.redis.xlen("{ms:0}:log:" + task["task_id"]) >= 2

        await eventually(two_tokens, what="two tokens")
        only.signal(signal.SIGKILL)
        await only.ended()
        await fleet.worker(lease_s=1)
        frames = sse.parse((await http.get(task["stream_url"])).text)
        sse.check_native(frames)
        assert sse.native_text(frames) == "😀"


async def test_bells_do_not_put_failover_off(fleet: LocalFleet) -> None:
    api = await fleet.api(keepalive_s=0.5)
    await asyncio.gather(fleet.worker(lease_s=1), fleet.worker(lease_s=1))
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        task = (await http.post("/tasks", json={"prompt": prompt(rate=20)})).json()
        owner = await fleet.owner(task["task_id"])
        owner.signal(signal.SIGKILL)
        reading = asyncio.create_task(http.get(task["stream_url"]))
        others = 0
        while not reading.done():  # some twenty bells a second
            await http.post("/tasks", json={"prompt": prompt(tokens=1)})
            others += 1
            await asyncio.wait({reading}, timeout=0.05)
        frames = [frame for frame in sse.parse((await reading).text) if frame.event != "queued"]
        sse.check_native(frames)
        assert len(frames) == TOKENS + 1
        assert others > 20
        assert (await http.get(f"/tasks/{task['task_id']}")).json()["attempts"] == 2
    await fleet.quiet()


async def test_a_poison_task_does_no_harm_to_those_it_meets(fleet: LocalFleet) -> None:
    api = await fleet.api(keepalive_s=0.5)
    settings = {"lease_s": 1, "max_concurrent": 16}
    workers = list(await asyncio.gather(*(fleet.worker(**settings) for _ in range(2))))
    async with httpx.AsyncClient(base_url=api.url, timeout=28) as http:
        good = [
            (await http.post("/tasks", json={"prompt": prompt(rate=20, tokens=40)})).json()
            for _ in range(16)
        ]
        poison = (await http.post("/tasks", json={"prompt": prompt(crash_at=5)})).json()
        ends = asyncio.gather(*(http.get(task["stream_url"]) for task in [*good, poison]))
        deaths = 0
        while not ends.done():  # what a supervisor does
            for worker in [worker for worker in workers if worker.popen.poll() is not None]:
                workers.remove(worker)
                deaths += 1
                workers.append(await fleet.worker(ready=False, **settings))
            await asyncio.wait({ends}, timeout=0.1)
        kinds = [sse.parse(answer.text)[-1].event for answer in await ends]
        assert kinds == ["completed"] * 16 + ["failed"]
        assert deaths == 3
    await fleet.quiet()
