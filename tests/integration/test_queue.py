"""The queue: bounded, refused early, told to those who wait, and kept while no worker lives."""

import asyncio
import json
import signal
import statistics
from collections import Counter

import httpx
import pytest
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.native import read, submit
from tests.support.waiting import eventually

from millstream.shared.keys import Keys


async def test_waiting_tasks_are_told_their_place(fleet: LocalFleet) -> None:
    pod = await fleet.api(keepalive_s=0.5)
    await fleet.worker(max_concurrent=1)
    async with httpx.AsyncClient(base_url=pod.url, timeout=20) as http:
        await read(http, await submit(http, tokens=4, rate=20))  # so that a rate is known
        first = await submit(http, tokens=30, rate=20)
        task_ids = [await submit(http, tokens=2) for _ in range(3)]
        answer = await http.get(f"/tasks/{task_ids[2]}/stream")
        frames = sse.parse(answer.text)
        hints = [frame for frame in frames if frame.event == "queued"]
        assert hints
        assert hints[0].id is None
        assert hints[0].json["position"] in (3, 4)
        assert 0 < hints[0].json["eta_s"] < 20
        assert any("ping" in frame.comments for frame in frames)
        sse.check_native(frames)
        assert (await http.get(f"/tasks/{first}")).json()["status"] == "completed"


async def test_a_refused_stream_does_not_count_as_open(fleet: LocalFleet) -> None:
    pod = await fleet.api(model="fake", max_queue=0)
    async with httpx.AsyncClient(base_url=pod.url, timeout=20) as http:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 503
        gauges = (await http.get("/metrics")).text.splitlines()
        assert [line for line in gauges if line.startswith("millstream_streams_open")] == [
            "millstream_streams_open 0.0"
        ]


async def test_who_is_far_back_is_told_later(fleet: LocalFleet) -> None:
    pod = await fleet.api(model="fake")
    async with httpx.AsyncClient(base_url=pod.url, timeout=20) as http:
        task_ids = [await submit(http, tokens=2) for _ in range(102)]
        told: list[int] = []

        async def two_hints(task_id: str) -> None:
            hints = 0
            async with http.stream("GET", f"/tasks/{task_id}/stream") as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        told.append(json.loads(line.removeprefix("data: "))["position"])
                        hints += 1
                    if hints == 2:
                        return

        async def both_told() -> bool:
            return sorted(told) == [50, 102]

        readers = asyncio.gather(two_hints(task_ids[49]), two_hints(task_ids[101]))
        await eventually(both_told)
        assert (await http.post(f"/tasks/{task_ids[0]}/stop")).json()["status"] == "cancelled"
        await readers
        assert told[2:] == [49, 101]
        for task_id in task_ids:
            await http.post(f"/tasks/{task_id}/stop")
    await fleet.quiet()


async def test_a_deadline_needs_no_worker(fleet: LocalFleet) -> None:
    pod = await fleet.api(model="fake")
    async with httpx.AsyncClient(base_url=pod.url, timeout=20) as http:
        body = {"prompt": "x", "deadline_s": 0.4, "priority": "batch"}
        answer = (await http.post("/tasks", json=body)).json()
        assert (answer["queue_position"], answer["eta_s"]) == (1, None)
        frames = await read(http, answer["task_id"])
        assert frames[-1].event == "failed"
        assert frames[-1].json["error"]["code"] == "deadline_exceeded"
        ended = (await http.get(f"/tasks/{answer['task_id']}")).json()
        assert ended["usage"]["total_tokens"] == 0
        assert 0.4 <= ended["finished_at"] - ended["created_at"] < 5
        refused = await http.post("/tasks", json={"prompt": "x", "deadline_s": 0})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "deadline_s")
    await fleet.quiet()


async def test_a_deadline_ends_what_runs_with_exact_usage(fleet: LocalFleet) -> None:
    pod = await fleet.api()
    await fleet.worker()
    async with httpx.AsyncClient(base_url=pod.url, timeout=20) as http:
        body = {"prompt": '@fake {"tokens": 10000, "rate": 50}', "deadline_s": 1.5}
        task_id = (await http.post("/tasks", json=body)).json()["task_id"]
        frames = [frame for frame in await read(http, task_id) if frame.event != "queued"]
        assert frames[-1].json["error"]["code"] == "deadline_exceeded"
        usage = (await http.get(f"/tasks/{task_id}")).json()["usage"]
        assert usage["completion_tokens"] == len(frames) - 1 > 0
    await fleet.quiet()  # its worker has let it go as well


@pytest.mark.timeout(150)
async def test_who_comes_back_when_told_gets_in(fleet: LocalFleet) -> None:
    """500 at once to a queue of 100: 100 are taken, and the others come one after another."""
    shards, slots = 4, 32
    settings = {"max_queue": 100, "shards": shards}
    one, two = await asyncio.gather(fleet.api(**settings), fleet.api(**settings))
    worker = await fleet.worker(shards=shards, max_concurrent=slots, lease_s=60)
    body = {"prompt": '@fake {"tokens": 2, "rate": 4}'}  # half a second: 64 a second
    limits = httpx.Limits(max_connections=100)
    async with (
        httpx.AsyncClient(base_url=one.url, timeout=60, limits=limits) as first,
        httpx.AsyncClient(base_url=two.url, timeout=60, limits=limits) as second,
    ):

        async def ask(at: int, **changed: str) -> httpx.Response:
            return await (first, second)[at % 2].post("/tasks", json=body | changed)

        warm = await asyncio.gather(*map(ask, range(slots)))
        for answer in warm:  # so that a rate is known
            await read(first, answer.json()["task_id"])
        long = '@fake {"tokens": 1, "delay_s": 4}'
        await asyncio.gather(*(ask(at, prompt=long) for at in range(slots)))
        await running(fleet, shards, slots)
        worker.signal(signal.SIGSTOP)  # it takes nothing while the 500 come
        answers = await asyncio.gather(*map(ask, range(500)))
        assert Counter(answer.status_code for answer in answers) == {202: 100, 503: 400}
        refused = [answer for answer in answers if answer.status_code == 503]
        told = Counter(int(answer.headers["retry-after"]) for answer in refused)
        assert min(told) == 1
        assert sum(told[second] for second in told if second > 4) > 100  # 400 places take 6 s
        worker.signal(signal.SIGCONT)

        async def come_back(at: int, refusal: httpx.Response) -> int:
            for tries in range(1, 20):
                await asyncio.sleep(int(refusal.headers["retry-after"]))
                refusal = await ask(at)
                if refusal.status_code == 202:
                    return tries
            raise AssertionError("told again and again")

        tries = await asyncio.gather(*map(come_back, range(400), refused))
        print(f"told {sorted(told.items())}; tries {sorted(Counter(tries).items())}")  # noqa: T201
        assert statistics.median(tries) <= 3  # the machine may be slower than it was measured
        await fleet.quiet(within_s=60)


async def running(fleet: LocalFleet, shards: int, count: int) -> None:
    """Wait until so many tasks run."""

    async def look() -> bool:
        views = [await fleet.scripts.waiting(Keys(at), model="fake") for at in range(shards)]
        return sum(view.running for view in views) == count

    await eventually(look, what=f"{count} running tasks")
