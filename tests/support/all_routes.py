"""Every route of the application, and a way to ask each: none can be forgotten."""

import asyncio
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, urlencode

import httpx
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.routing import Mount, Route
from websockets.asyncio.client import connect

from millstream.api.app import create_app
from millstream.shared.settings import Settings

OPEN = {
    "/health", "/ready", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json",
    "/", "/fleet", "/static", "/metrics",
}  # fmt: skip
"""Paths without anything of anyone's."""
OTHERS = {
    "/v1/models/{name:path}", "/fleet/workers/{worker_id}/drain", "/fleet/tasks/{task_id}/stop"
}  # fmt: skip
"""Paths whose parameter names no task, or that are an administrator's alone."""
TASKS: dict[str, str] = {"task_id": "{}", "response_id": "resp_{}"}
"""Path parameters that name a task, and how its id is written there."""


def flat(routes: Iterable[Any]) -> Iterator[Any]:
    """The routes themselves: FastAPI keeps a router that was included as one."""
    for route in routes:
        router = getattr(route, "original_router", None)
        if router is None:
            yield route
        else:
            assert route.include_context.prefix == ""
            yield from flat(router.routes)


def routes() -> Iterator[tuple[str, str]]:
    """Method and path of every route of the application."""
    app, _ = create_app(Settings())
    for route in flat(app.routes):
        if isinstance(route, APIWebSocketRoute):
            yield "WEBSOCKET", route.path
        elif isinstance(route, Mount):
            yield "GET", route.path
        else:
            assert isinstance(route, APIRoute | Route), f"{route}: what is it, and whose?"
            for method in sorted(route.methods or ()):
                yield method, route.path


def task_routes() -> list[tuple[str, str]]:
    """Those of one task. A new kind of path has to say here what it names."""
    found = []
    for method, path in routes():
        names = re.findall(r"\{(\w+)", path)
        if names and path not in OTHERS:
            assert set(names) <= set(TASKS), f"{path}: does it name a task? Say so in this file."
            found.append((method, path))
    return found


def closed_routes() -> list[tuple[str, str]]:
    return [(method, path) for method, path in routes() if path not in OPEN]


def as_caller(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(
    http: httpx.AsyncClient, method: str, path: str, *, task_id: str = "x", **options: Any
) -> httpx.Response:
    """A route, with an id wherever its path has one."""
    for name, form in TASKS.items():
        path = path.replace(f"{{{name}}}", form.format(task_id))
    path = re.sub(r"\{\w+(:path)?\}", "x", path)
    headers = dict(options.pop("headers", {}))
    if method == "WEBSOCKET":
        return await knock(http, path, headers=headers, params=options.get("params", {}))
    return await http.request(method, path, headers=headers, **options)


async def knock(
    http: httpx.AsyncClient, path: str, *, headers: dict[str, str], params: dict[str, str]
) -> httpx.Response:
    """What a WebSocket is refused with: its error frame, under the status its code stands for."""
    url = str(http.base_url).rstrip("/").replace("http", "ws", 1) + quote(path, safe="/%")
    given = {name: value for name, value in http.headers.items() if name == "authorization"}
    async with (
        asyncio.timeout(10),
        connect(f"{url}?{urlencode(params)}", additional_headers=given | headers) as socket,
    ):
        frame = json.loads(await socket.recv())
        assert frame["event"] == "error", frame
        await socket.wait_closed()
    assert socket.close_code is not None
    data, again = frame["data"], {}
    if socket.close_code == 1013:
        again = {"Retry-After": str(data.pop("retry_after_s"))}
    status = 503 if again else socket.close_code - 4000
    return httpx.Response(status, json=data, headers=again)
