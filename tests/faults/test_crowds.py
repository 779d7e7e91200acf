"""F6 and F19: crowds at the door: the same request many times, and more than may wait."""

import asyncio
from collections import Counter

import httpx
import pytest
from tests.support.fault_report import FaultRun
from tests.support.faults import owners, prompt
from tests.support.local_fleet import LocalFleet
from tests.support.native import read

from millstream.shared.keys import Keys

QUEUE = Keys(0).queue("fake")


async def keys_of(fleet: LocalFleet, kind: str) -> int:
    return len([key async for key in fleet.redis.scan_iter(f"*:{kind}:*", count=1000)])


@pytest.mark.fault("F6 one request fifty times")
async def test_one_key_is_one_task_on_any_pod(fleet: LocalFleet, fault: FaultRun) -> None:
    pods = await asyncio.gather(fleet.api(model="fake"), fleet.api(model="fake"))
    async with (
        httpx.AsyncClient(base_url=pods[0].url, timeout=20) as one,
        httpx.AsyncClient(base_url=pods[1].url, timeout=20) as two,
    ):
        body, headers = {"prompt": prompt(tokens=5)}, {"Idempotency-Key": "order 66"}
        answers = await asyncio.gather(
            *(http.post("/tasks", json=body, headers=headers) for http in (one, two) * 25)
        )
        assert Counter(answer.status_code for answer in answers) == {202: 50}
        (task_id,) = {answer.json()["task_id"] for answer in answers}
        assert await fleet.redis.xlen(QUEUE) == 1
        assert await keys_of(fleet, "task") == 1
        fault.hits += len(answers) - 1

        other = await two.post("/tasks", json={"prompt": "other"}, headers=headers)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
        assert await fleet.redis.xlen(QUEUE) == 1

        free = await asyncio.gather(*(http.post("/tasks", json=body) for http in (one, two) * 25))
        assert len({answer.json()["task_id"] for answer in free} - {task_id}) == 50
        assert await fleet.redis.xlen(QUEUE) == 51

        await fleet.worker()
        assert (await read(one, task_id))[-1].event == "completed"
        again = await two.post("/tasks", json=body, headers=headers)  # a late copy runs nothing
        assert again.json()["task_id"] == task_id
        assert again.json()["status"] == "completed"
    await fleet.quiet()


@pytest.mark.fault("F19 more than may wait")
async def test_a_full_queue_refuses_exactly_the_rest(fleet: LocalFleet, fault: FaultRun) -> None:
    settings = {"model": "fake", "max_queue": 100}
    pods = await asyncio.gather(fleet.api(**settings), fleet.api(**settings))
    answers: list[httpx.Response] = []

    async def client(number: int) -> None:
        async with httpx.AsyncClient(base_url=pods[number % 2].url, timeout=20) as http:
            for _ in range(10):
                answers.append(await http.post("/tasks", json={"prompt": prompt(tokens=2)}))
                assert await fleet.redis.xlen(QUEUE) <= 100

    await asyncio.gather(*(client(number) for number in range(50)))
    assert Counter(answer.status_code for answer in answers) == {202: 100, 503: 400}
    refused = [answer for answer in answers if answer.status_code == 503]
    assert {answer.json()["error"]["code"] for answer in refused} == {"queue_full"}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert await fleet.redis.xlen(QUEUE) == 100
    assert await keys_of(fleet, "task") == 100  # what was refused left nothing
    fault.hits += len(refused)
    async with httpx.AsyncClient(base_url=pods[0].url, timeout=20) as http:
        # Before any body, so that a client that streams sees a status and no broken stream.
        chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        streamed = await http.post("/v1/chat/completions", json=chat)
        assert streamed.status_code == 503
        assert int(streamed.headers["retry-after"]) >= 1
        await fleet.worker()
        accepted = [answer.json()["task_id"] for answer in answers if answer.status_code == 202]
        assert len(set(accepted)) == 100
        ends = await asyncio.gather(*(read(http, task_id) for task_id in accepted))
        assert {frames[-1].event for frames in ends} == {"completed"}
    await fleet.quiet()
    assert await owners(fleet) == {}
