"""The native events on a WebSocket, as a test reads them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

Frames = list[dict[str, Any]]


@contextlib.asynccontextmanager
async def opened(url: str, path: str, **options: Any) -> AsyncIterator[ClientConnection]:
    async with (
        asyncio.timeout(25),
        connect(url.replace("http", "ws", 1) + path, proxy=None, **options) as socket,
    ):
        yield socket


async def rest(socket: ClientConnection) -> tuple[Frames, int | None]:
    """All frames to the end, and the closing code."""
    frames: Frames = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            frames.append(json.loads(await socket.recv()))
    return frames, socket.close_code


def numbered(frames: Frames) -> Frames:
    return [frame for frame in frames if "id" in frame]


def text_of(frames: Frames) -> str:
    return "".join(frame["data"]["text"] for frame in frames if frame["event"] == "token")
