"""Idempotency-Key: on every route one key is one task, whichever pods it comes to and how often."""

import asyncio

import httpx
import pytest
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.native import read
from tests.support.routes import asking, making_routes
from tests.support.waiting import eventually

from millstream.shared.keys import Keys


async def test_a_key_is_one_task_on_every_route(fleet: LocalFleet) -> None:
    pods = await asyncio.gather(*(fleet.api(rate_limit_requests_per_min=50) for _ in range(2)))
    await fleet.worker()
    async with (
        httpx.AsyncClient(base_url=pods[0].url, timeout=20) as one,
        httpx.AsyncClient(base_url=pods[1].url, timeout=20) as two,
    ):
        routes = await making_routes(one)

        async def race(path: str) -> None:
            headers = {"Idempotency-Key": f"key of {path}"}
            body = asking(path, '@fake {"tokens": 3}\nhello')
            racing = (pod.post(path, json=body, headers=headers) for pod in (one, two, one, two))
            answers = await asyncio.gather(*racing)
            answers.append(await two.post(path, json=body, headers=headers))
            assert {answer.status_code for answer in answers} <= {200, 202}, path
            ids = {answer.headers["x-task-id"] for answer in answers}
            assert len(ids) == 1, path
            await read(one, *ids)
            other = await two.post(path, json=asking(path, "other"), headers=headers)
            assert other.status_code == 409, path
            error = other.json()["error"]
            assert error["code"] == "idempotency_key_reused"
            assert error["param"] == "Idempotency-Key"

        for path in routes:
            await race(path)
        answer = await one.post("/tasks", json={"prompt": '@fake {"tokens": 3}\nhello'})
        left = int(answer.headers["x-ratelimit-remaining-requests"])
        assert left == 50 - len(routes) - 1
        await read(one, answer.json()["task_id"])
        rows = (await two.get("/usage")).json()["data"]
        assert sum(row["tasks"] for row in rows) == len(routes) + 1
        assert sum(row["completion_tokens"] for row in rows) == 3 * (len(routes) + 1)
    await fleet.quiet()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_key_belongs_to_its_route(shared_fleet: LocalFleet) -> None:
    """The same bytes mean something else there: the answer would have the form of the first."""
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as http:
        body = {"prompt": '@fake {"tokens": 3}\nhello'}
        routes = ("/generate", "/chat", "/generate/stream", "/tasks", "/v1/completions")
        for number, first in enumerate(routes):
            key = {"Idempotency-Key": f"route {number}"}
            made = await http.post(first, json=body, headers=key)
            for path in routes:
                answer = await http.post(path, json=body, headers=key)
                if path == first:
                    assert answer.headers["x-task-id"] == made.headers["x-task-id"]
                    continue
                assert answer.status_code == 409, (first, path)
                assert answer.json()["error"]["code"] == "idempotency_key_reused"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_known_answer_has_the_time_of_the_first(
    shared_fleet: LocalFleet, path: str
) -> None:
    """To the byte, but that the task is said here to be older than it is."""
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as http:
        body, key = asking(path, '@fake {"tokens": 3}\nhello'), {"Idempotency-Key": f"at {path}"}
        first = await http.post(path, json=body, headers=key)
        task = Keys(0).task(first.headers["x-task-id"])
        created_ms = int(await shared_fleet.redis.hget(task, "created"))
        assert first.json()["created"] == created_ms // 1000
        assert (await http.post(path, json=body, headers=key)).content == first.content
        await shared_fleet.redis.hset(task, "created", created_ms - 100_000)
        again = await http.post(path, json=body, headers=key)
        assert again.json() == {**first.json(), "created": created_ms // 1000 - 100}
        body, key = {**body, "stream": True}, {"Idempotency-Key": f"stream at {path}"}
        first = await http.post(path, json=body, headers=key)
        task = Keys(0).task(first.headers["x-task-id"])
        await shared_fleet.redis.hincrby(task, "created", -100_000)
        again = await http.post(path, json=body, headers=key)
        (before,), (after,) = (
            {frame.json["created"] for frame in sse.parse(answer.text) if frame.data != "[DONE]"}
            for answer in (first, again)
        )
        assert after == before - 100


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_whose_task_has_expired_is_a_410(fleet: LocalFleet, stream: bool) -> None:
    """Streams too: there is nothing to begin one with."""
    api, _ = await asyncio.gather(fleet.api(result_ttl_s=1), fleet.worker(result_ttl_s=1))
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        asked: dict[str, dict[str, object]] = {}
        tasks: list[str] = []
        for path in await making_routes(http):
            asked[path] = asking(path, '@fake {"tokens": 3}\nhello')
            if stream and path != "/tasks":
                asked[path]["stream"] = True
            made = await http.post(path, json=asked[path], headers={"Idempotency-Key": path})
            assert made.status_code in (200, 202), path
            tasks.append(made.headers["x-task-id"])
        for task_id in tasks:

            async def expired(task_id: str = task_id) -> bool:
                return (await http.get(f"/tasks/{task_id}")).status_code == 410

            await eventually(expired, what="the end of a task's life")
        for path, body in asked.items():
            again = await http.post(path, json=body, headers={"Idempotency-Key": path})
            assert again.status_code == 410, path
            assert again.json()["error"]["code"] == "task_expired"
            assert again.json()["error"]["type"] == "invalid_request_error"
    await fleet.quiet()
