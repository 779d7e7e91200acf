"""The queue: bounded, refused early, told to those who wait, and kept while no worker lives."""

import asyncio

import httpx
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.native import read, submit


async def test_stop_before_any_worker_is_kept(fleet: LocalFleet) -> None:
    pod = await fleet.api(model="fake")
    async with httpx.AsyncClient(base_url=pod.url, timeout=20) as http:
        task_id = await submit(http, tokens=5)
        other = await submit(http, tokens=5)
        stopped = (await http.post(f"/tasks/{task_id}/stop")).json()
        assert stopped["status"] == "cancelled"
        assert stopped["usage"]["completion_tokens"] == 0
        frames = await read(http, task_id)
        assert [(frame.id, frame.event) for frame in frames] == [("1", "cancelled")]
        await fleet.worker()
        assert (await read(http, other))[-1].event == "completed"
        task = (await http.get(f"/tasks/{task_id}")).json()
        assert (task["status"], task["attempts"], task["text"]) == ("cancelled", 0, "")
    await fleet.quiet()


async def test_a_full_queue_refuses_exactly_the_rest(fleet: LocalFleet) -> None:
    pod = await fleet.api(model="fake", max_queue=20)
    limits = httpx.Limits(max_connections=50)
    async with httpx.AsyncClient(base_url=pod.url, timeout=20, limits=limits) as http:
        answers = await asyncio.gather(
            *(http.post("/tasks", json={"prompt": '@fake {"tokens": 2}'}) for _ in range(100))
        )
        accepted = [answer.json()["task_id"] for answer in answers if answer.status_code == 202]
        refused = [answer for answer in answers if answer.status_code == 503]
        assert (len(accepted), len(refused)) == (20, 80)
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert {answer.json()["error"]["code"] for answer in refused} == {"queue_full"}
        assert await fleet.redis.xlen("{ms:0}:queue:fake") == 20
        streamed = await http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "x"}], "stream": True},
        )
        assert streamed.status_code == 503
        assert int(streamed.headers["retry-after"]) >= 1
        await fleet.worker()
        for task_id in accepted:
            assert (await read(http, task_id))[-1].event == "completed"


async def test_waiting_tasks_are_told_their_place(fleet: LocalFleet) -> None:
    pod = await fleet.api(keepalive_s=0.5)
    await fleet.worker(max_concurrent=1)
    async with httpx.AsyncClient(base_url=pod.url, timeout=20) as http:
        first = await submit(http, tokens=30, rate=20)
        task_ids = [await submit(http, tokens=2) for _ in range(3)]
        answer = await http.get(f"/tasks/{task_ids[2]}/stream")
        frames = sse.parse(answer.text)
        hints = [frame for frame in frames if frame.event == "queued"]
        assert hints
        assert hints[0].id is None
        assert hints[0].json["position"] in (3, 4)
        assert hints[0].json["eta_s"] >= 0
        assert any("ping" in frame.comments for frame in frames)
        sse.check_native(frames)
        assert (await http.get(f"/tasks/{first}")).json()["status"] == "completed"
