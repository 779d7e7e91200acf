"""An application on the server as the pod runs it, without a pod."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp
from tests.support.waiting import eventually
from uvicorn.server import ServerState

from millstream.api.http import BoundedHttp


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[tuple[int, ServerState]]:
    config = uvicorn.Config(app, http=BoundedHttp, lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BoundedHttp(config, state, {}), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], state
    finally:
        server.close()
        for task in state.tasks:
            task.cancel()
        for connection in state.connections.copy():
            connection.transport.abort()
        await eventually_no_tasks(state)


async def eventually_no_tasks(state: ServerState) -> None:
    async def none_left() -> bool:
        return not state.tasks

    await eventually(none_left, within_s=10, what="the ends of all requests")
