"""Scripts on the kept connection: as quick as it is, they end as they do on any other."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from redis.exceptions import OutOfMemoryError
from tests.support.link import Way
from tests.support.waiting import until

from millstream.fleet.chaos.link import Link
from millstream.shared.connection import CALL_S, POOL_SIZE, RedisError, open_redis
from millstream.shared.keys import WORKERS, Keys
from millstream.shared.scripts import Scripts

SHARD = Keys(0)


@pytest.fixture
async def scripts(link: Link) -> AsyncIterator[Scripts]:
    async with open_redis(link.url) as client:
        yield Scripts(client)


async def members(scripts: Scripts) -> set[bytes]:
    return set(await scripts.roster(WORKERS, ttl_s=60))


async def say(scripts: Scripts, name: str) -> None:
    await scripts.heartbeat(WORKERS, member=name, json=name.encode(), ttl_s=60)


async def test_one_after_the_other_takes_one_connection_more(scripts: Scripts, way: Way) -> None:
    for number in range(20):
        await say(scripts, f"w{number}")
    assert len(await members(scripts)) == 20
    assert way.made <= 2


async def test_many_at_once_share_the_pool(scripts: Scripts, link: Link) -> None:
    await say(scripts, "first")
    await asyncio.gather(*(say(scripts, f"w{number}") for number in range(2 * POOL_SIZE)))
    assert len(await members(scripts)) == 2 * POOL_SIZE + 1
    assert link.connections <= POOL_SIZE


async def test_a_cut_connection_is_no_error(scripts: Scripts, link: Link) -> None:
    for number in range(5):
        await say(scripts, f"w{number}")
        link.reset()
    assert len(await members(scripts)) == 5


async def test_a_connection_that_was_lost_while_it_was_idle_is_not_kept(
    scripts: Scripts, link: Link
) -> None:
    """Its transport would swallow what is written, and tell nobody."""
    await say(scripts, "w")
    (idle,) = scripts._client.connection_pool._available_connections
    link.reset()
    await until(lambda: idle._reader.at_eof() or idle._reader.exception() is not None)
    async with asyncio.timeout(10):
        await say(scripts, "x")
        assert await members(scripts) == {b"w", b"x"}


async def test_a_transport_that_never_tells_of_its_loss_is_given_up_in_time(
    scripts: Scripts,
) -> None:
    for _ in range(2):
        await say(scripts, "w")
    kept = scripts._client.kept
    kept._exchange._transport.set_protocol(asyncio.Protocol())  # hears for it from now on
    async with asyncio.timeout(10):
        await say(scripts, "x")
    assert await members(scripts) == {b"w", b"x"}


async def test_silent_connections_cost_one_wait(scripts: Scripts, way: Way) -> None:
    for _ in range(3):
        await say(scripts, "w")
    way.deafen()
    began = time.monotonic()
    await say(scripts, "x")
    assert time.monotonic() - began < CALL_S
    made = way.made
    await say(scripts, "y")
    assert await members(scripts) == {b"w", b"x", b"y"}
    assert way.made <= made + 1


async def test_a_silent_server_is_given_up_in_time(scripts: Scripts, link: Link) -> None:
    await say(scripts, "w")
    link.silence()
    began = time.monotonic()
    with pytest.raises(RedisError):
        await say(scripts, "x")
    assert time.monotonic() - began < CALL_S + 2  # for a busy machine
    link.heal()
    await say(scripts, "y")
    assert b"y" in await members(scripts)


async def test_what_a_cancelled_call_left_reaches_nobody(scripts: Scripts, link: Link) -> None:
    """B1 (redis-py#2624): the next caller read its answer."""
    for _ in range(2):
        await say(scripts, "w")
    link.slow_down(0.05)
    for number in range(5):
        asking = asyncio.create_task(members(scripts))
        await asyncio.sleep(0.01 * number)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        assert await scripts.depth(SHARD, model="m") is not None
    link.heal()
    assert await members(scripts) == {b"w"}


async def test_who_must_not_repeat_is_told_of_a_lost_answer(link: Link, way: Way) -> None:
    """A claim's: what it gave would be nobody's. What was not begun is sent again all the same."""
    async with open_redis(link.url, pool_size=2, retries=0) as client:
        scripts = Scripts(client)
        for _ in range(2):
            await say(scripts, "w")
        await client.script_flush()
        await say(scripts, "x")
        await say(scripts, "x")
        way.deafen()
        made = way.made
        with pytest.raises(RedisError):
            await say(scripts, "y")
        assert way.made == made
        assert await members(scripts) == {b"w", b"x", b"y"}


async def test_an_error_of_a_script_is_told(scripts: Scripts) -> None:
    for _ in range(2):
        await scripts.ready()
    await scripts.runner.client.config_set("maxmemory", "1")
    with pytest.raises(OutOfMemoryError):
        await scripts.ready()
    await scripts.runner.client.config_set("maxmemory", "0")
    for _ in range(2):
        await scripts.ready()


async def test_a_connection_closed_while_it_connects_is_a_lost_one(link: Link) -> None:
    """Who watches a master closes all connections to it, those on their way to it among them."""
    async with open_redis(link.url) as client:
        for turns in range(60):  # of the event loop, in which the connection gets further each time
            connection = client.connection_pool.make_connection()
            connecting = asyncio.create_task(connection.connect())
            for _ in range(turns):
                await asyncio.sleep(0)
            await connection.disconnect(nowait=True)
            with contextlib.suppress(RedisError):  # or it has connected again
                await connecting
            await connection.disconnect(nowait=True)
