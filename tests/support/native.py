"""Asking for tasks and reading them through the native form."""

import json

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
