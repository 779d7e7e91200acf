"""Limits per caller over two pods: exact, told in OpenAI's words; nothing where there are none."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from tests.support.local_fleet import LEASE_S, Api, LocalFleet
from tests.support.native import read, submit
from tests.support.routes import asking, streaming_routes
from tests.support.store import Store
from tests.support.waiting import eventually

from millstream.shared.keys import Keys

STATE = ("requests", "tokens", "balance", "streams", "ended")


@asynccontextmanager
async def clients(*apis: Api) -> AsyncIterator[list[httpx.AsyncClient]]:
    async with (
        httpx.AsyncClient(base_url=apis[0].url, timeout=25) as one,
        httpx.AsyncClient(base_url=apis[-1].url, timeout=25) as two,
    ):
        yield [one, two]


def fake(**directive: object) -> str:
    return f"@fake {json.dumps(directive)}\nhello"


def standing(answer: httpx.Response) -> dict[str, str]:
    return {
        name.removeprefix("x-ratelimit-"): value
        for name, value in answer.headers.items()
        if name.startswith("x-ratelimit-")
    }


@pytest.mark.asyncio(loop_scope="module")
async def test_without_limits_nothing_is_told_or_counted(shared_fleet: LocalFleet) -> None:
    async with httpx.AsyncClient(base_url=shared_fleet.url) as http:
        answer = await http.post("/tasks", json={"prompt": fake(tokens=2)})
        assert answer.status_code == 202
        assert standing(answer) == {}
        await read(http, answer.json()["task_id"])
    names = [key async for key in shared_fleet.redis.scan_iter("{ms:*}:*")]
    assert not any(name.split(b":")[2].decode() in STATE for name in names)


async def test_two_pods_let_no_more_in_than_one_would(fleet: LocalFleet) -> None:
    limit = {"rate_limit_requests_per_min": 60}
    pods = await asyncio.gather(fleet.api(**limit), fleet.api(**limit))
    await fleet.worker()
    answers: list[httpx.Response] = []
    async with clients(*pods) as https:

        async def hammer(number: int) -> None:
            path, body = ("/tasks", {"prompt": fake(tokens=1)})
            if number % 2:
                message = {"role": "user", "content": fake(tokens=1)}
                path, body = "/v1/chat/completions", {"messages": [message]}
            for turn in range(25):
                # Whoever one says that one is, one is oneself.
                other = {"X-Forwarded-For": f"10.0.{number}.{turn}"}
                answers.append(await https[turn % 2].post(path, json=body, headers=other))

        await asyncio.gather(*(hammer(number) for number in range(4)))
        accepted = [answer for answer in answers if answer.status_code in (200, 202)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert (len(accepted), len(refused)) == (60, 40)
        left = sorted(int(standing(answer)["remaining-requests"]) for answer in accepted)
        assert left == list(range(60))
        assert {standing(answer)["limit-requests"] for answer in answers} == {"60"}
        assert {standing(answer)["remaining-requests"] for answer in refused} == {"0"}
        for answer in refused:
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert "x-task-id" not in answer.headers
        tasks = [key async for key in fleet.redis.scan_iter("*:task:*")]
        assert len(tasks) == 60

        page = {"Origin": "http://localhost:3000"}
        exposed = (await https[0].post("/tasks", json={"prompt": "x"}, headers=page)).headers[
            "access-control-expose-headers"
        ]
        assert set(answers[-1].headers) & {f"x-ratelimit-{n}" for n in standing(answers[-1])}
        for name in ("x-ratelimit-remaining-requests", "x-ratelimit-reset-tokens", "retry-after"):
            assert name in exposed
    async with openai.AsyncOpenAI(base_url=f"{pods[0].url}/v1", api_key="x", max_retries=0) as ai:
        with pytest.raises(openai.RateLimitError) as raised:
            await ai.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "x"}], stream=True
            )
    assert raised.value.code == "rate_limit_exceeded"
    await fleet.quiet()


async def test_what_makes_no_task_does_not_count(fleet: LocalFleet) -> None:
    limit = {"rate_limit_requests_per_min": 2, "rate_limit_tokens_per_min": 1000}
    pods = await asyncio.gather(fleet.api(**limit), fleet.api(max_queue=0, **limit))
    await fleet.worker()
    async with clients(*pods) as (one, full):
        body = {"prompt": fake(tokens=1), "max_tokens": 300}
        for _ in range(3):
            assert (await full.post("/tasks", json=body)).status_code == 503
            assert (await one.post("/tasks", json={"prompt": 5})).status_code == 400
            assert (await one.post("/tasks", json={**body, "model": "no"})).status_code == 404
        # One key is one task, however often and wherever it is sent.
        key = {"Idempotency-Key": "k"}
        tries = (one.post("/tasks", json=body, headers=key) for _ in range(4))
        answers = await asyncio.gather(*tries)
        assert {answer.status_code for answer in answers} <= {202, 429}
        ids = {answer.json()["task_id"] for answer in answers if answer.status_code == 202}
        assert len(ids) == 1
        await read(one, *ids)
        second = await one.post("/tasks", json=body)
        assert standing(second)["remaining-requests"] == "0"
        assert (await one.post("/tasks", json=body)).status_code == 429
        for pod in (one, full):
            again = await pod.post("/tasks", json=body, headers=key)
            assert (again.status_code, again.json()["task_id"]) == (202, *ids)
        other = await one.post("/tasks", json={"prompt": "other"}, headers=key)
        assert other.status_code == 409
        never = await one.post("/tasks", json={"prompt": "x", "max_tokens": 1000})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "max_tokens")
    await fleet.quiet()


async def test_tokens_are_settled_when_the_task_has_ended(fleet: LocalFleet) -> None:
    limit = {"rate_limit_tokens_per_min": 10_000, "shards": 2}
    pods = await asyncio.gather(fleet.api(**limit), fleet.api(**limit))
    first, _ = await asyncio.gather(fleet.worker(shards=2), fleet.worker(shards=2))

    async with clients(*pods) as (one, two):

        async def ask(http: httpx.AsyncClient, most: int, **directive: object) -> httpx.Response:
            body = {"prompt": fake(**directive), "max_tokens": most}
            return await http.post("/tasks", json=body)

        ids: list[str] = []
        for _ in range(4):
            answer = await ask(one, 2000, tokens=40, rate=20)
            ids.append(answer.json()["task_id"])
        assert int(standing(answer)["remaining-tokens"]) < 2000
        refused = await ask(two, 2000, tokens=1)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "tokens"

        async def begun() -> bool:
            looks = [(await one.get(f"/tasks/{task_id}")).json() for task_id in ids]
            return all(look["usage"]["completion_tokens"] > 3 for look in looks)

        await eventually(begun, what="tokens of each task")
        first.signal(signal.SIGKILL)
        await one.post(f"/tasks/{ids[0]}/stop")
        await asyncio.gather(*(read(two, task_id) for task_id in ids))
        answer = await ask(two, 1000, tokens=1)
        used = 0
        for task_id in ids:
            usage: dict[str, int] = (await one.get(f"/tasks/{task_id}")).json()["usage"]
            used += usage["total_tokens"]
        prompt = -(-len(fake(tokens=1)) // 4)
        assert int(standing(answer)["remaining-tokens"]) == 10_000 - used - prompt - 1000
        assert standing(answer)["limit-tokens"] == "10000"
        assert "limit-requests" not in standing(answer)
    await fleet.quiet()


async def test_streams_are_counted_where_they_are_open(fleet: LocalFleet) -> None:
    limit = {"rate_limit_concurrent_streams": 2, "keepalive_s": 0.2}
    pods = await asyncio.gather(fleet.api(**limit), fleet.api(**limit))
    await fleet.worker()
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": fake(tokens=1000, rate=20)}],
        "stream": True,
    }
    async with clients(*pods) as (one, two):
        task_id = await submit(one, tokens=1000, rate=20)

        asked: list[tuple[str, str, Any]] = [("GET", f"/tasks/{task_id}/stream", None)]
        for path in await streaming_routes(one):
            more = {} if path.endswith("/stream") else {"stream": True}
            asked.append(("POST", path, {**asking(path, fake(tokens=1)), **more}))

        async def refused() -> None:
            for method, path, body in asked:
                async with two.stream(method, path, json=body) as answer:
                    assert answer.status_code == 429, path
                    assert answer.headers["retry-after"] == "1"
                    error = json.loads(await answer.aread())["error"]
                    assert error["code"] == "rate_limit_exceeded"

        async def opened(http: httpx.AsyncClient) -> bool:
            async with http.stream("GET", f"/tasks/{task_id}/stream") as answer:
                return answer.status_code == 200

        async with one.stream("GET", f"/tasks/{task_id}/stream") as first:
            assert first.status_code == 200
            async with two.stream("POST", "/v1/chat/completions", json=chat) as second:
                assert second.status_code == 200
                await refused()
                whole = {**chat, "stream": False, "max_tokens": 1}
                assert (await two.post("/v1/chat/completions", json=whole)).status_code == 200
                # Longer than a lease: they count because their pods say so.
                begun = time.monotonic()
                lines = second.aiter_lines()  # kept: to forget them is to leave
                async for _ in lines:
                    if time.monotonic() - begun > LEASE_S + 0.5:
                        break
                await refused()
            await eventually(lambda: opened(two), what="a place for a stream")
            tasks = [key async for key in fleet.redis.scan_iter("*:task:*")]
            assert len(tasks) == 3  # who was refused made none

            async def last_place() -> bool:
                key = Keys(0).streams("anonymous")
                return await fleet.redis.zcard(key) == 1

            await eventually(last_place, what="the end of the stream before")
            async with two.stream("POST", "/v1/chat/completions", json=chat) as second:
                assert second.status_code == 200
                await refused()
                pods[0].signal(signal.SIGKILL)
                await eventually(lambda: opened(two), what="the lapse of a dead pod's stream")
        await two.post(f"/tasks/{task_id}/stop")
    await fleet.quiet()


async def test_an_answer_is_no_longer_than_the_caller_may_have(fleet: LocalFleet) -> None:
    api = await fleet.api(rate_limit_tokens_per_stream=5)
    await fleet.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        for body in ({}, {"max_tokens": 5}):
            task_id = (await http.post("/tasks", json={"prompt": fake(tokens=9), **body})).json()[
                "task_id"
            ]
            last = (await read(http, task_id))[-1].json
            assert (last["finish_reason"], last["usage"]["completion_tokens"]) == ("length", 5)
        answer = await http.post("/tasks", json={"prompt": "x", "max_tokens": 6})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    await fleet.quiet()


async def test_so_many_wait_and_so_long_they_may_take(fleet: LocalFleet) -> None:
    api = await fleet.api(rate_limit_waiting_tasks=3, rate_limit_minutes_per_stream=1)
    await fleet.worker(max_concurrent=1)
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        running = await submit(http, tokens=10_000, rate=5)

        async def begun() -> bool:
            return (await http.get(f"/tasks/{running}")).json()["status"] == "running"

        await eventually(begun, what="the start of a task")
        body = {"prompt": fake(tokens=10_000, rate=5)}
        answers = await asyncio.gather(*(http.post("/tasks", json=body) for _ in range(20)))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) == 17
        for answer in refused:
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            assert int(answer.headers["retry-after"]) >= 1
        waiting = [a.json()["task_id"] for a in answers if a.status_code == 202]
        await http.post(f"/tasks/{waiting[0]}/stop")
        waiting.append((await http.post("/tasks", json=body)).json()["task_id"])
        assert (await http.post("/tasks", json=body)).status_code == 429
        many = {"messages": [{"role": "user", "content": "x"}], "n": 4}
        answer = await http.post("/v1/chat/completions", json=many)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        fields = await fleet.scripts.task_fields(Keys(0), running)
        assert int(fields["deadline"]) - int(fields["created"]) == 60_000
        for task_id in (running, *waiting):
            await http.post(f"/tasks/{task_id}/stop")
    await fleet.quiet()


async def test_nobody_is_let_in_unseen(frail: LocalFleet, store: Store) -> None:
    limits = {"rate_limit_requests_per_min": 9, "rate_limit_concurrent_streams": 9}
    api = await frail.api(**limits)
    await frail.worker()
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
        store.send(signal.SIGSTOP)
        began = time.monotonic()
        answers = await asyncio.gather(
            http.post("/v1/chat/completions", json=chat),
            http.post("/v1/chat/completions", json={**chat, "stream": True}),
            http.post("/tasks", json={"prompt": "x"}, headers={"Idempotency-Key": "k"}),
        )
        assert time.monotonic() - began < 5
        store.send(signal.SIGCONT)
        for answer in answers:
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
