"""Asking for tasks and reading them through the native form."""

import json
import time

import httpx
from tests.support import sse


async def submit(http: httpx.AsyncClient, prompt: str = "hello", **directive: object) -> str:
    body = {"prompt": f"@fake {json.dumps(directive)}\n{prompt}"}
    answer = await http.post("/tasks", json=body)
    assert answer.status_code == 202, answer.text
    return answer.json()["task_id"]


async def read(http: httpx.AsyncClient, task_id: str, after: int | None = None) -> list[sse.Frame]:
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    answer = await http.get(f"/tasks/{task_id}/stream", headers=headers)
    assert answer.status_code == 200, answer.text
    return sse.parse(answer.text)


async def token_times(http: httpx.AsyncClient, **directive: object) -> list[float]:
    """Submit a task and read it; when each of its tokens came, in seconds from the request."""
    begin = time.monotonic()
    task_id = await submit(http, **directive)
    async with http.stream("GET", f"/tasks/{task_id}/stream") as answer:
        return [
            time.monotonic() - begin
            async for frame in sse.frames(answer.aiter_lines())
            if frame.event == "token"
        ]
