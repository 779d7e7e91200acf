"""The routes that make a task, as the pod itself lists them: what is added later is tested too."""

from typing import Any

import httpx


async def making_routes(http: httpx.AsyncClient) -> list[str]:
    """The paths of all POSTs with a body."""
    paths: dict[str, Any] = (await http.get("/openapi.json")).json()["paths"]
    found = [path for path, methods in paths.items() if "requestBody" in methods.get("post", {})]
    assert {"/tasks", "/v1/chat/completions", "/v1/responses"} <= set(found)
    return found


async def streaming_routes(http: httpx.AsyncClient) -> list[str]:
    """Those of them that answer by a stream if they are asked to, or always."""
    paths: dict[str, Any] = (await http.get("/openapi.json")).json()["paths"]
    found: list[str] = []
    for path in await making_routes(http):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        if "stream" in schema["properties"] or path.endswith("/stream"):
            found.append(path)
    return found


def asking(path: str, text: str) -> dict[str, Any]:
    """The smallest body with which a route makes a task."""
    if path == "/v1/chat/completions":
        return {"messages": [{"role": "user", "content": text}]}
    return {"input" if path == "/v1/responses" else "prompt": text}
