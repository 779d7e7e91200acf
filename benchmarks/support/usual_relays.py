"""The usual relays: `EventSourceResponse`, and for each stream a connection to the store.

    python -m benchmarks.support.usual_relays PORT REDIS_URL

- `/published/{id}/stream` subscribes to a channel: who reads now is told, nothing is kept.
- `/kept/{id}/stream` reads a Redis stream with `XREAD BLOCK`: all is kept, and who comes back with
  `Last-Event-ID` goes on from there. Nothing fences its writer, or says who runs a task.
"""

import sys
from collections.abc import AsyncGenerator
from typing import Any

import redis.asyncio
import uvicorn
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

Events = AsyncGenerator[dict[str, str]]


def app(store: redis.asyncio.Redis) -> Starlette:
    """An app that relays what is written to that store."""
    client: Any = store

    async def published(request: Request) -> EventSourceResponse:
        subscription = client.pubsub(ignore_subscribe_messages=True)
        # Before the response begins: whoever sees its head may publish.
        await subscription.subscribe(request.path_params["task_id"])

        async def events() -> Events:
            try:
                async for message in subscription.listen():
                    yield {"data": message["data"]}
            finally:
                await subscription.aclose()

        return EventSourceResponse(events())

    async def kept(request: Request) -> EventSourceResponse:
        log = request.path_params["task_id"]

        async def events(last: str) -> Events:
            while True:
                for _, entries in await client.xread({log: last}, block=60_000) or ():
                    for number, entry in entries:
                        last = number
                        yield {"id": number, "data": entry["data"]}

        return EventSourceResponse(events(request.headers.get("last-event-id", "0")))

    ways = {"published": published, "kept": kept}
    return Starlette(
        routes=[Route(f"/{name}/{{task_id}}/stream", way) for name, way in ways.items()]
    )


if __name__ == "__main__":
    port, redis_url = sys.argv[1:]
    client = redis.asyncio.Redis.from_url(redis_url, decode_responses=True, max_connections=20_000)
    uvicorn.run(app(client), host="127.0.0.1", port=int(port), access_log=False, log_level="error")
