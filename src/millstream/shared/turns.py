"""Turns: who asks first is served first, and nobody waits for ever."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from redis.exceptions import ConnectionError as RedisConnectionError


@asynccontextmanager
async def turn(room: asyncio.Semaphore, *, wait_s: float) -> AsyncGenerator[None]:
    """A place in a room with so many, for as long as the context lasts.

    Raises:
        redis.exceptions.ConnectionError: none came free in time, as with a Redis that is away.
    """
    try:
        async with asyncio.timeout(wait_s):
            await room.acquire()
    except TimeoutError:
        raise RedisConnectionError("No connection available.") from None
    try:
        yield
    finally:
        room.release()
