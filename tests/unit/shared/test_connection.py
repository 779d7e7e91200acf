"""What a lost connection looks like to callers, whatever event loop runs."""

import asyncio
from typing import Any

import pytest
import uvloop
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.support.store import Store

from millstream.shared.connection import open_redis, open_subscriber


def test_a_connection_reset_a_moment_ago_is_a_lost_one(store: Store) -> None:
    """uvloop raises RuntimeError for it, which pods answered with 500 (found by chaos)."""

    async def send_after_reset(client: Any) -> None:
        connection = await client.connection_pool.get_connection()
        connection._writer.transport.abort()
        with pytest.raises(RedisConnectionError):
            await connection.send_command("PING")
        await client.connection_pool.release(connection)

    async def main() -> None:
        async with open_redis(store.url) as client:
            await send_after_reset(client)
            assert await client.ping()
        async with open_subscriber(store.url, "{ms:0}:pod:x") as subscriber:
            await send_after_reset(subscriber)

    uvloop.run(main())


async def test_calls_take_turns(redis_url: str) -> None:
    """redis-py's pool gave a connection back to who had just let it go, for ever."""
    async with open_redis(redis_url, pool_size=2) as client:
        over = False

        async def ask_on() -> None:
            while not over:
                await client.get("{ms:0}:nothing")

        crowd = [asyncio.create_task(ask_on()) for _ in range(6)]
        try:
            for _ in range(20):
                assert await client.get("{ms:0}:nothing") is None
        finally:
            over = True
            await asyncio.gather(*crowd, return_exceptions=True)
