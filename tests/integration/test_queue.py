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
