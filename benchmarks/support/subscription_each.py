"""The usual relay: `EventSourceResponse`, and a subscription of its own for each stream.

    python -m benchmarks.support.subscription_each PORT STORE_PORT

What a worker publishes on a task's channel goes to whoever reads that task now; nothing is kept.
"""

import sys
from collections.abc import AsyncGenerator

import redis.asyncio
import uvicorn
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route


def app(store: redis.asyncio.Redis) -> Starlette:
    """An app that relays what is published in that store."""

    async def stream(request: Request) -> EventSourceResponse:
        subscription = store.pubsub(ignore_subscribe_messages=True)
        # Before the response begins: whoever sees its head may publish.
        await subscription.subscribe(request.path_params["task_id"])

        async def events() -> AsyncGenerator[dict[str, str]]:
            try:
                async for message in subscription.listen():
                    yield {"data": message["data"]}
            finally:
                await subscription.aclose()

        return EventSourceResponse(events())

    return Starlette(routes=[Route("/tasks/{task_id}/stream", stream)])


if __name__ == "__main__":
    port, redis_url = sys.argv[1:]
    client = redis.asyncio.Redis.from_url(redis_url, decode_responses=True, max_connections=20_000)
    uvicorn.run(app(client), host="127.0.0.1", port=int(port), access_log=False, log_level="error")
