"""The queue: bounded, refused early, told to those who wait, and kept while no worker lives."""

import httpx
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.native import read, submit


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
