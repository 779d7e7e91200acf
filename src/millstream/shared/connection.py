"""Opening Redis the way this project needs it, and telling its failures apart."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError as RedisConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError as RedisTimeout,
)
from redis.retry import Retry

# A command answers in under a millisecond; a Redis that takes seconds is away as far as a caller
# can tell.
SOCKET_TIMEOUT_S = 1.5
CONNECT_TIMEOUT_S = 1.0
POOL_WAIT_S = 2.0
POOL_SIZE = 16
# A whole call, with its wait for a connection, a retry, and a script that has to be sent again.
# With the look at the roster before it, it stays under the 5 s in which the API must answer 503.
CALL_S = 3.5
# redis-py leaves the keywords of these untyped.
_PoolClass: Any = redis.asyncio.BlockingConnectionPool
_AsyncClass: Any = redis.asyncio.Redis
_BlockingClass: Any = redis.Redis
_RETRIED = (RedisConnectionError, RedisTimeout)

# A script passes its commands' errors on as plain ResponseErrors. MISCONF: the disk is full.
_PASSING = ("OOM", "READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "MISCONF")

# What passes by itself: the network, a restart, a failover, a full memory that is emptied.
TRANSIENT_ERRORS = (
    RedisConnectionError,
    RedisTimeout,
    BusyLoadingError,
    ReadOnlyError,
    OutOfMemoryError,
    ConnectionError,
    asyncio.TimeoutError,
)


def is_transient(error: BaseException) -> bool:
    """Whether a failure of Redis heals by itself, so that trying again later makes sense."""
    if isinstance(error, TRANSIENT_ERRORS):
        return True
    return isinstance(error, ResponseError) and any(word in str(error) for word in _PASSING)


def _socket_options(url: str) -> dict[str, Any]:
    """What only a TCP connection has: redis-py raises a TypeError for these on a Unix socket."""
    if url.startswith("unix://"):
        return {}
    return {"socket_connect_timeout": CONNECT_TIMEOUT_S, "socket_keepalive": True}


class _Client(redis.asyncio.Redis):
    """A client that leaves a server which has become a replica; redis-py stays for ever."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """As redis-py's; after READONLY, later calls connect to where the name leads by then."""
        untyped: Any = super()
        try:
            return await untyped.execute_command(*args, **options)
        except ReadOnlyError:
            await self.connection_pool.disconnect(inuse_connections=False)
            raise


class _PlainSpoken:
    """Mixed into redis-py's connections: uvloop has a word of its own for a lost one."""

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """As redis-py's; a transport that was reset a moment ago is a lost connection too."""
        untyped: Any = super()
        try:
            await untyped.send_packed_command(command, check_health)
        except RuntimeError as error:
            raise RedisConnectionError(str(error)) from error


def _speak_plainly(pool: Any) -> None:
    """Make a pool's connections, which depend on the URL, raise what callers look for."""
    pool.connection_class = type("Connection", (_PlainSpoken, pool.connection_class), {})


@asynccontextmanager
async def open_redis(
    url: str, *, pool_size: int = POOL_SIZE
) -> AsyncGenerator[redis.asyncio.Redis]:
    """A client whose calls fail within seconds and are tried once more, for blind retries are safe.

    Waits for a pooled connection for `POOL_WAIT_S` at most, then fails like an absent Redis.
    """
    pool: redis.asyncio.BlockingConnectionPool = _PoolClass.from_url(
        url,
        max_connections=pool_size,
        timeout=POOL_WAIT_S,
        socket_timeout=SOCKET_TIMEOUT_S,
        health_check_interval=0,
        **_socket_options(url),
        retry=AsyncRetry(ExponentialBackoff(cap=0.2, base=0.05), 1, supported_errors=_RETRIED),
    )
    _speak_plainly(pool)
    client = _Client(connection_pool=pool)
    try:
        yield client
    finally:
        await client.aclose()
        await pool.aclose()


def open_subscriber(url: str) -> redis.asyncio.Redis:
    """A client for one pub/sub connection: reads wait for ever, lost connections are reported."""
    client: redis.asyncio.Redis = _AsyncClass.from_url(
        url,
        socket_timeout=None,
        **_socket_options(url),
        retry=AsyncRetry(NoBackoff(), 0),
    )
    _speak_plainly(client.connection_pool)
    return client


def open_blocking_redis(url: str) -> redis.Redis:
    """A client for the thread that renews leases: no retries, since it keeps time itself."""
    return _BlockingClass.from_url(
        url,
        socket_timeout=SOCKET_TIMEOUT_S,
        **_socket_options(url),
        retry=Retry(NoBackoff(), 0),
    )


__all__ = [
    "CALL_S",
    "TRANSIENT_ERRORS",
    "RedisError",
    "RedisTimeout",
    "is_transient",
    "open_blocking_redis",
    "open_redis",
    "open_subscriber",
]
