"""Somebody deleted a part of a task: whoever needs what is missing is told so (B55)."""

from typing import Any

import httpx
import pytest
from tests.support import sse
from tests.support.faults import held, submit, written
from tests.support.local_fleet import LocalFleet
from tests.support.native import read
from tests.support.waiting import eventually

from millstream.shared.keys import Keys

TEXT = '@fake {"tokens": 300}\nhello'  # more than one page of the log
LAST = 301
TORN = (410, "log_incomplete")


async def tear(fleet: LocalFleet, task_id: str, *lost: int) -> None:
    deleted = await fleet.redis.xdel(Keys(0).log(task_id), *(f"{number}-0" for number in lost))
    assert deleted == len(lost)


def code_of(answer: httpx.Response) -> tuple[int, Any]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "lost",
    [range(1, 17), [290], [LAST - 1], [LAST], range(1, LAST + 1)],
    ids=["beginning", "midst", "last token", "end", "all"],
)
async def test_a_hole_is_never_read_over(
    shared_fleet: LocalFleet, lost: list[int], request: pytest.FixtureRequest
) -> None:
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as http:

        async def chat(*, stream: bool) -> httpx.Response:
            body = {"messages": [{"role": "user", "content": TEXT}], "stream": stream}
            key = {"Idempotency-Key": f"{request.node.name} {stream}"}
            return await http.post("/v1/chat/completions", json=body, headers=key)

        body = {"input": TEXT, "background": True, "stream": True}
        made = [
            await chat(stream=False),
            await chat(stream=True),
            await http.post("/v1/responses", json=body),
        ]
        task_ids = [answer.headers["x-task-id"] for answer in made]
        for task_id in task_ids:
            await tear(shared_fleet, task_id, *lost)
        task, response = f"/tasks/{task_ids[0]}", f"/v1/responses/resp_{task_ids[2]}"

        # What is whole or nothing.
        assert code_of(await http.get(task)) == TORN
        assert code_of(await chat(stream=False)) == TORN  # from the log, as its key came before
        assert code_of(await http.get(response)) == TORN

        # What is told as far as it goes.
        before = {"Last-Event-ID": str(lost[0] - 1)}
        assert code_of(await http.get(f"{task}/stream", headers=before)) == TORN
        if lost[0] > 1:
            *told, error = await read(http, task_ids[0])
            assert [int(frame.id or 0) for frame in told] == list(range(1, len(told) + 1))
            assert len(told) < lost[0]
            assert (error.event, error.json["error"]["code"]) == ("error", "log_incomplete")
        again = (await chat(stream=True)).text
        assert "log_incomplete" in again
        assert '"finish_reason":"stop"' not in again
        assert "[DONE]" not in again
        if lost[0] > 1:
            again = (await http.get(response, params={"stream": "true"})).text
            assert "log_incomplete" in again
            assert "response.completed" not in again

        # Who has what is missing reads on, and what is stored can be deleted.
        if lost[-1] < LAST:
            rest = await read(http, task_ids[0], after=lost[-1])
            assert [frame.id for frame in rest] == [str(n) for n in range(lost[-1] + 1, LAST + 1)]
        assert (await http.delete(response)).status_code == 200


async def test_no_worker_goes_on_over_a_hole(fleet: LocalFleet) -> None:
    await fleet.api()
    first = await fleet.worker(lease_s=1)
    async with httpx.AsyncClient(base_url=fleet.url, timeout=20) as http:
        task_ids = [await submit(http, held(10, tokens=20)) for _ in range(3)]
        await written(fleet, dict.fromkeys(task_ids, 10))
        first.kill()
        for task_id, lost in zip(task_ids, ([1, 2], [5], range(1, 11)), strict=True):
            await tear(fleet, task_id, *lost)
        second = await fleet.worker(lease_s=1)

        async def failed() -> bool:
            states = [
                (await fleet.scripts.task_fields(Keys(0), task_id))["state"] for task_id in task_ids
            ]
            return states == ["failed"] * len(task_ids)

        await eventually(failed, what="the tasks to fail")
        for task_id in task_ids:
            (end,) = await read(http, task_id, after=10)
            assert (end.id, end.event) == ("11", "failed")
            assert end.json["error"]["code"] == "log_incomplete"
        assert len(await read(http, await submit(http, held(tokens=3)))) == 4
        assert second.popen.poll() is None
    await fleet.quiet()


async def test_a_task_whose_request_is_gone_fails_alone(fleet: LocalFleet) -> None:
    """Waiting or taken over; the workers that get it live on."""
    await fleet.api()
    async with httpx.AsyncClient(base_url=fleet.url, timeout=20) as http:
        first = await fleet.worker(lease_s=1, max_concurrent=1)
        running = await submit(http, held(3, tokens=9))
        await written(fleet, {running: 3})
        waiting = await submit(http, held(tokens=3))
        for task_id in (running, waiting):
            assert await fleet.redis.hdel(Keys(0).task(task_id), "request") == 1
        first.kill()
        second = await fleet.worker(lease_s=1)
        for task_id in (running, waiting):
            end = (await read(http, task_id))[-1]
            assert (end.event, end.json["error"]["code"]) == ("failed", "internal_error")
        assert len(await read(http, await submit(http, held(tokens=3)))) == 4
        assert second.popen.poll() is None
    await fleet.quiet()


async def test_foreign_entries_of_an_ended_log_are_passed_over(fleet: LocalFleet) -> None:
    await fleet.api()
    await fleet.worker()
    async with httpx.AsyncClient(base_url=fleet.url, timeout=20) as http:
        task_id = await submit(http, held(tokens=3))
        frames = await read(http, task_id)
        whole = (await http.get(f"/tasks/{task_id}")).json()
        await fleet.redis.xadd(Keys(0).log(task_id), {"q": "x"})
        assert (await http.get(f"/tasks/{task_id}")).json() == whole
        assert await read(http, task_id) == frames
    await fleet.quiet()


async def test_a_foreign_entry_ahead_ends_its_task_alone(fleet: LocalFleet) -> None:
    await fleet.api()
    worker = await fleet.worker()
    async with httpx.AsyncClient(base_url=fleet.url, timeout=20) as http:
        prompt = '@fake {"tokens": 60, "rate": 20}'
        expected = await read(http, await submit(http, prompt))
        victim, *others = [await submit(http, prompt) for _ in range(3)]

        async def writes() -> bool:
            return int((await fleet.scripts.task_fields(Keys(0), victim))["seq"]) >= 10

        await eventually(writes)
        event = {"k": "t", "a": "1", "i": "5", "d": '"x"'}
        await fleet.redis.xadd(Keys(0).log(victim), event, id="500-0")
        for task_id in others:
            assert sse.native_text(await read(http, task_id)) == sse.native_text(expected)
        assert code_of(await http.get(f"/tasks/{victim}")) == (404, "task_not_found")
        assert "append was refused" not in worker.text()
    await fleet.quiet()
