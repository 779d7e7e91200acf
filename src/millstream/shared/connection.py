"""Opening Redis the way this project needs it, and telling its failures apart."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ClusterError,
    ConnectionError as RedisConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError as RedisTimeout,
    TryAgainError,
)

from millstream.shared.address import RedisAddress, Topology, parse_address
from millstream.shared.cancellation import cancel_until_done
from millstream.shared.cluster import BoundedCluster
from millstream.shared.server_client import PlainSpoken, ServerClient

# A command answers in under a millisecond; a Redis that takes seconds is away as far as a caller
# can tell.
SOCKET_TIMEOUT_S = 1.5
CONNECT_TIMEOUT_S = 1.0
POOL_WAIT_S = 2.0
POOL_SIZE = 16
# A whole call, with its wait for a connection, a retry, a script that has to be sent again, and
# the other nodes of a cluster that are asked. With the look at the roster before it (1 s), a pod
# that has much to do has a second left of the 5 in which the API must answer 503.
CALL_S = 3.0
# While two servers think that they are the master, what the old one is told is lost to the new.
MASTER_LOOK_S = 0.5
SENTINEL_S = 0.5

# redis-py leaves the keywords of these untyped.
_BlockingPool: Any = redis.asyncio.BlockingConnectionPool
_Sentinels: Any = Sentinel
_RETRIED = (RedisConnectionError, RedisTimeout)

# A script passes its commands' errors on as plain ResponseErrors. MISCONF: the disk is full.
_PASSING = ("OOM", "READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "MISCONF", "NOREPLICAS")

# What passes by itself: the network, a restart, a failover, a full memory that is emptied.
TRANSIENT_ERRORS = (
    RedisConnectionError,
    RedisTimeout,
    BusyLoadingError,
    ClusterError,
    OutOfMemoryError,
    ReadOnlyError,
    TryAgainError,
    ConnectionError,
    asyncio.TimeoutError,
)


def is_transient(error: BaseException) -> bool:
    """Whether a failure of Redis heals by itself, so that trying again later makes sense."""
    if isinstance(error, TRANSIENT_ERRORS):
        return True
    return isinstance(error, ResponseError) and any(word in str(error) for word in _PASSING)


def is_full(error: BaseException) -> bool:
    """Whether Redis takes no more, and answers all the same."""
    return isinstance(error, OutOfMemoryError) or "OOM" in str(error)


@asynccontextmanager
async def open_redis(
    url: str, *, pool_size: int = POOL_SIZE, retries: int = 1
) -> AsyncGenerator[redis.asyncio.Redis]:
    """A client whose calls fail within seconds and are tried once more.

    Blind retries are safe for all steps but one: what the lost answer to a claim gave would be
    nobody's until its lease lapsed. Whoever claims has no `retries` and asks what is its own.

    Calls wait for their turn for `POOL_WAIT_S` at most, then fail like an absent Redis. A
    cluster's client has the commands of a server's and is no subclass of it; nobody needs to know.
    """
    address = parse_address(url)
    retry = Retry(ExponentialBackoff(cap=0.2, base=0.05), retries, supported_errors=_RETRIED)
    if address.topology is Topology.CLUSTER:
        async with _open_cluster(address, calls=pool_size, retry=retry) as cluster:
            yield cast(redis.asyncio.Redis, cluster)
        return
    async with _open_server(
        address,
        pool_size=pool_size,
        repeats=retries > 0,
        retry=retry,
        socket_timeout=SOCKET_TIMEOUT_S,
    ) as client:
        yield client


def _speak_plainly(pool: Any) -> None:
    """Make a pool's connections, which depend on the URL, raise what callers look for."""
    pool.connection_class = type("Connection", (PlainSpoken, pool.connection_class), {})


@asynccontextmanager
async def open_subscriber(url: str, channel: str) -> AsyncGenerator[redis.asyncio.Redis]:
    """A client for a subscription to one sharded channel, on the server that has it.

    Reads wait for ever, and lost connections are reported.
    """
    address = parse_address(url)
    retry = Retry(NoBackoff(), 0)
    home = None
    if address.topology is Topology.CLUSTER:
        async with _open_cluster(address, calls=1, retry=retry) as cluster:
            home = await cluster.home_of(channel)
    async with _open_server(address, node=home, retry=retry, socket_timeout=None) as client:
        yield client


@asynccontextmanager
async def _open_cluster(
    address: RedisAddress, *, calls: int, retry: Retry
) -> AsyncGenerator[BoundedCluster]:
    cluster = BoundedCluster(
        address,
        calls=calls,
        wait_s=POOL_WAIT_S,
        retry=retry,
        socket_timeout=SOCKET_TIMEOUT_S,
        **_tcp(),
    )
    try:
        yield cluster
    finally:
        await cluster.aclose()


@asynccontextmanager
async def _open_server(
    address: RedisAddress,
    *,
    node: tuple[str, int] | None = None,
    pool_size: int = 1,
    repeats: bool = True,
    **options: Any,
) -> AsyncGenerator[redis.asyncio.Redis]:
    """A client of one data server: the one of the URL, a cluster's node, the Sentinels' master."""
    options |= {"max_connections": pool_size, "timeout": POOL_WAIT_S}
    if not address.url.startswith("unix://"):  # a TypeError there
        options |= _tcp()
    master = None
    if address.topology is Topology.SINGLE:
        pool = _BlockingPool.from_url(address.url, **options)
    elif node is not None:
        login = dict(address.login)
        if login.pop("ssl", False):
            options["connection_class"] = redis.asyncio.SSLConnection
        pool = _BlockingPool(host=node[0], port=node[1], **login, **options)
    else:
        login = dict(address.login)
        tls = login.pop("ssl", False)
        master = _Master(address)
        pool = _BlockingPool(
            connection_class=_MasterSSLConnection if tls else _MasterConnection,
            connection_pool=master,
            **login,
            **options,
        )
    _speak_plainly(pool)
    client = ServerClient(
        pool, calls=pool_size, wait_s=POOL_WAIT_S, script_s=SOCKET_TIMEOUT_S, repeats=repeats
    )
    watching = asyncio.create_task(master.watch(pool)) if master is not None else None
    try:
        yield client
    finally:
        if watching is not None:
            await cancel_until_done([watching])
        await client.aclose()
        await pool.aclose()
        if master is not None:
            await master.aclose()


def _tcp() -> dict[str, Any]:
    return {"socket_connect_timeout": CONNECT_TIMEOUT_S, "socket_keepalive": True}


class _AsksAgain:
    """Mixed into connections to a master: one that was cut asks anew where the master is.

    redis-py connects again to where it was when it sends a call once more, and would so stay with
    a master that has just been left.
    """

    async def connect_check_health(self, *args: Any, **options: Any) -> None:
        """As redis-py's."""
        untyped: Any = self
        if not untyped.is_connected:
            untyped.host, untyped.port = await untyped.connection_pool.get_master_address()
        base: Any = super()
        await base.connect_check_health(*args, **options)


class _MasterConnection(_AsksAgain, SentinelManagedConnection):
    pass


class _MasterSSLConnection(_AsksAgain, SentinelManagedSSLConnection):
    pass


class _Master:
    """What a SentinelManagedConnection asks of its pool: redis-py's own never blocks when full."""

    is_master = True
    check_connection = False

    def __init__(self, address: RedisAddress) -> None:
        # In another order each time, and each asked once: the first may be on the lost machine.
        self._sentinels: Any = _Sentinels(
            random.sample(address.nodes, len(address.nodes)),
            sentinel_kwargs={
                **address.sentinel_login,
                "socket_connect_timeout": SENTINEL_S,
                "socket_timeout": SENTINEL_S,
                "retry": Retry(NoBackoff(), 0),
            },
        )
        self._service = address.service

    async def get_master_address(self) -> tuple[str, int]:
        """Host and port of the server that is written to now."""
        try:
            return await self._sentinels.discover_master(self._service)
        except MasterNotFoundError:  # its text has all that redis-py knows of each connection
            message = f"no Sentinel answers that knows the master {self._service!r}"
            raise MasterNotFoundError(message) from None

    async def watch(self, pool: Any) -> None:
        """Leave a master that is one no more: it can be seconds until it is told so itself."""
        last, leaving = None, 0
        while True:
            await asyncio.sleep(MASTER_LOOK_S)
            try:
                now = await self.get_master_address()
            except (RedisError, *TRANSIENT_ERRORS):
                continue
            if last is not None and now != last:
                leaving = 2  # again next time: a connection may have been on its way to the old one
            last = now
            if leaving:
                leaving -= 1
                with suppress(RedisError, *TRANSIENT_ERRORS):  # one is told off, all are closed
                    await pool.disconnect()

    async def aclose(self) -> None:
        await self._sentinels.aclose()


__all__ = [
    "CALL_S",
    "TRANSIENT_ERRORS",
    "RedisError",
    "RedisTimeout",
    "is_full",
    "is_transient",
    "open_redis",
    "open_subscriber",
]
