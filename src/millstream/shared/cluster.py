"""The client of a Redis Cluster, which fails in the ways that a client of one server does."""

import asyncio
import re
from typing import Any

import redis.asyncio
from redis.asyncio.cluster import ClusterNode
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError as RedisConnectionError,
    NoPermissionError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from millstream.shared.address import RedisAddress
from millstream.shared.cancellation import cancel_until_done
from millstream.shared.turns import turn

MOST_CONNECTIONS = 2**16
# What redis-py raises besides RedisErrors; the last three while a cluster has no slots yet.
_ODD = (RedisClusterException, IndexError, KeyError, AttributeError)

_REFUSALS = (AuthenticationError, AuthorizationError, NoPermissionError)


class BoundedCluster(redis.asyncio.RedisCluster):
    """redis-py's cluster client, but calls wait for their turn, and all errors are RedisErrors.

    Args:
        address: The cluster's.
        calls: How many calls may be under way at once, for each hash tag.
        wait_s: How long one waits for its turn before it fails like an absent Redis.
        options: redis-py's, for client and connections.
    """

    def __init__(self, address: RedisAddress, *, calls: int, wait_s: float, **options: Any) -> None:
        base: Any = super()  # redis-py leaves some keywords untyped
        base.__init__(
            startup_nodes=[ClusterNode(host, port) for host, port in address.nodes],
            # A node that is down takes its shards with it and no others.
            require_full_coverage=False,
            # One MOVED moves one slot; asking anew each fifth time would cut calls under way.
            reinitialize_steps=0,
            max_connections=MOST_CONNECTIONS,  # never reached: `calls` bounds them
            **address.login,
            **options,
        )
        self._wait_s = wait_s
        self._calls = calls
        self._room: dict[str, asyncio.Semaphore] = {}
        self._seeds = list(self.startup_nodes)
        self._reading: asyncio.Task[Any] | None = None

    async def initialize(self, *args: Any, **kwargs: Any) -> "BoundedCluster":
        """Read the map of the cluster where it is in doubt: once, for all who wait for it.

        Who gives up waiting leaves the reading be: redis-py closes the connections of all calls
        under way when one is cancelled.
        """
        if self._initialize:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(super().initialize(*args, **kwargs))
            await asyncio.shield(self._reading)
        return self

    async def aclose(self) -> None:
        """Close all connections."""
        if self._reading is not None:
            await cancel_until_done([self._reading])
        await super().aclose()

    async def primaries(self) -> list[ClusterNode]:
        """The nodes that are written to.

        Raises:
            RedisError: no node answers.
        """
        try:
            await self.initialize()
        except _ODD as error:
            raise self._usual(error) from error
        return self.get_primaries()

    async def home_of(self, name: str) -> tuple[str, int]:
        """Host and port of the primary that has a key or a sharded channel.

        Raises:
            RedisError: none has it, or no node answers.
        """
        try:
            await self.initialize()
            node = self.get_node_from_key(name)
        except _ODD as error:
            raise self._usual(error) from error
        if node is None:
            raise RedisConnectionError(f"no node of the cluster has {name}")
        return node.host, int(node.port)

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command on the node it belongs to."""
        # A tag each, since a node that is silent must not take the places of all others' calls.
        tag = next((match[0] for arg in args[:8] if (match := _find_tag(arg))), "")
        room = self._room.setdefault(tag, asyncio.Semaphore(self._calls))
        async with turn(room, wait_s=self._wait_s):
            try:
                return await super().execute_command(*args, **kwargs)
            except _ODD as error:
                raise self._usual(error) from error
            except RuntimeError as error:  # uvloop's word for a connection that was just reset
                raise RedisConnectionError(str(error)) from error

    def _usual(self, error: Exception) -> RedisError:
        """The same as an error of the client's usual kind, which these are not.

        What a server refused a user is told as it is; redis-py takes it for an absent cluster.
        Also puts the given nodes back in: those found later may all have got new addresses.
        """
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, _REFUSALS):
                return cause
            cause = cause.__cause__ or cause.__context__
        if "Cluster mode is not enabled" in str(error):
            return ResponseError("this is no Redis Cluster; its URL begins with redis://")
        for node in self._seeds:
            self.nodes_manager.startup_nodes.setdefault(node.name, node)
        return RedisConnectionError(str(error))


def _find_tag(argument: Any) -> re.Match[str] | None:
    return re.match(r"\{[^}]*\}", argument) if isinstance(argument, str) else None
