"""A Redis that stands still: each route says so in time, and nothing half done is left of it."""

import asyncio
import json
import signal
import time
from typing import Any

import httpx
from tests.support.all_routes import as_caller, ask, closed_routes
from tests.support.faults import busy
from tests.support.local_fleet import LocalFleet
from tests.support.native import read, submit
from tests.support.routes import asking
from tests.support.store import Store
from tests.support.waiting import eventually
from websockets.asyncio.client import connect

ADMIN = "key-of-admin-0123456789"
WITHIN_S = 5.0
TOLD = {"/v1/models", "/v1/models/{name:path}"}
"""What a pod knows by itself for a while."""
FOLLOWED = {"/v1/chat/ws"}
"""What wants a message first."""


def ways(method: str, path: str) -> list[dict[str, Any]]:
    """What a route is asked with: whole and as a stream, if it makes a task."""
    if method == "GET" and path in ("/chat", "/generate/stream"):
        return [{"headers": {"Accept": "text/event-stream"}, "params": {"prompt": "x"}}]
    if method != "POST" or "{" in path:
        return [{}]
    body = asking(path, "x")
    if path in ("/tasks", "/generate/stream"):
        return [{"json": body}]
    return [{"json": {**body, "stream": stream}} for stream in (True, False)]


async def test_every_route_says_so_in_time_and_makes_nothing(
    store: Store, frail: LocalFleet
) -> None:
    limits = {
        "rate_limit_requests_per_min": 10_000,
        "rate_limit_tokens_per_min": 10_000_000,
        "rate_limit_concurrent_streams": 200,
    }
    api = await frail.api(api_keys=f"admin:{ADMIN}", **limits)
    await frail.worker()
    connections = httpx.Limits(max_connections=100)
    late: list[tuple[str, float]] = []

    async def refused(method: str, path: str, **options: Any) -> None:
        began = time.monotonic()
        answer = await ask(http, method, path, **options)
        if (took := time.monotonic() - began) > WITHIN_S * busy():
            late.append((f"{method} {path}", took))
        assert answer.status_code == 503 or path in TOLD, (method, path, answer.text)
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "redis_unavailable", (method, path)
            assert int(answer.headers["retry-after"]) >= 1, (method, path)

    async def chat_refused() -> None:
        url = api.url.replace("http", "ws", 1) + "/v1/chat/ws"
        async with asyncio.timeout(20), connect(url, additional_headers=as_caller(ADMIN)) as socket:
            await socket.send(json.dumps(asking("/v1/chat/completions", "x")))
            frame = json.loads(await socket.recv())
            await socket.wait_closed()
        assert frame["data"]["error"]["code"] == "redis_unavailable"
        assert socket.close_code == 1013

    async with httpx.AsyncClient(
        base_url=api.url, headers=as_caller(ADMIN), timeout=25, limits=connections
    ) as http:
        task_id = await submit(http, tokens=3)
        await read(http, task_id)
        body = {"input": "x", "background": True}
        stored = (await http.post("/v1/responses", json=body)).json()["id"].removeprefix("resp_")
        await frail.quiet()
        made = {key async for key in frail.redis.scan_iter("*:task:*")}
        store.send(signal.SIGSTOP)
        try:
            asked = [
                refused(
                    method, path, task_id=stored if "{response_id}" in path else task_id, **more
                )
                for method, path in closed_routes()
                if method != "HEAD" and path not in FOLLOWED
                for more in ways(method, path)
            ]
            asked.append(chat_refused())
            await asyncio.gather(*asked)
        finally:
            store.send(signal.SIGCONT)
        assert not late

        async def undone() -> bool:
            tasks = {key async for key in frail.redis.scan_iter("*:task:*")}
            open_streams = [key async for key in frail.redis.scan_iter("*:streams:*")]
            return tasks <= made and not open_streams

        await eventually(undone, within_s=20, what="all that was refused to be undone")
        assert (await read(http, await submit(http, tokens=3)))[-1].event == "completed"
        assert "Traceback" not in api.text()
    await frail.quiet()
