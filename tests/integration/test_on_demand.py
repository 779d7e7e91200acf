"""Models that are started when tasks come: pods take the tasks before any worker was there."""

import httpx
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.native import read


async def test_one_task_waits_for_the_first_worker_ever(fleet: LocalFleet) -> None:
    api = await fleet.api(on_demand_models="small, large")
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        assert (await http.get("/ready")).status_code == 200
        answer = await http.post("/tasks", json={"prompt": '@fake {"tokens": 3}', "model": "large"})
        assert answer.status_code == 202
        # What an autoscaler sees.
        (model,) = (await http.get("/fleet.json")).json()["models"]
        assert (model["name"], model["waiting"], model["running"]) == ("large", 1, 0)
        # Others are as unknown as ever, and a choice of two is none.
        for body, status in (({"model": "huge"}, 404), ({}, 400)):
            assert (await http.post("/tasks", json={"prompt": "x", **body})).status_code == status
        await fleet.worker(model="large")
        frames = await read(http, answer.json()["task_id"])
    sse.check_native(frames)
    assert frames[-1].event == "completed"
    await fleet.quiet()
