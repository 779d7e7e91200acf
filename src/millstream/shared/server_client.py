"""The client of one server, whose calls take turns; a script has a quicker way that it tries first.

redis-py takes a connection from its pool for each call, looks whether it is sound, starts two
timeouts, counts, and gives it back: 115 µs of CPU here, of which sending and receiving are 30. A
worker makes such a call each decode step, so one connection is kept aside for scripts.
"""

import asyncio
from typing import Any

import hiredis
import redis.asyncio
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
    ReadOnlyError,
    ResponseError,
)

from millstream.shared.turns import turn

_hiredis: Any = hiredis  # leaves untyped what it gives


class ServerClient(redis.asyncio.Redis):
    """A client whose calls take turns, and that leaves a server which has become a replica.

    redis-py's pool has turns for nobody: who gives a connection back and asks again at once has it
    before those who wait, for ever if there are enough of them. And it stays with a replica.

    Args:
        pool: A pool of connections.
        calls: How many it holds.
        wait_s: How long a call waits for its turn before it fails like an absent Redis.
        script_s: How long a script may take on the kept connection. None: there is none, as with a
            pool of one.
    """

    def __init__(self, pool: Any, *, calls: int, wait_s: float, script_s: float | None) -> None:
        base: Any = super()  # redis-py leaves some keywords untyped
        base.__init__(connection_pool=pool)
        self._wait_s = wait_s
        self.kept: KeptConnection | None = None
        """For scripts that may be sent again another way, if this one fails."""
        if script_s is not None and calls > 1:
            self.kept = KeptConnection(pool, within_s=script_s)
            calls -= 1
        self._room = asyncio.Semaphore(calls)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """As redis-py's; after READONLY, later calls connect to where the name leads by then."""
        untyped: Any = super()
        async with turn(self._room, wait_s=self._wait_s):
            try:
                return await untyped.execute_command(*args, **options)
            except ReadOnlyError:
                await self.connection_pool.disconnect(inuse_connections=False)
                raise


class KeptConnection:
    """A pool's connection that stays out of it, for one call at a time.

    Whatever goes wrong, an error that the server answers included, ends it. It is used again when
    somebody has had an answer otherwise: an absent Redis is not asked for twice as long.

    Args:
        pool: Whose connections are `PlainSpoken`.
        within_s: How long a call may take.
    """

    def __init__(self, pool: Any, *, within_s: float) -> None:
        self._pool = pool
        self._within_s = within_s
        self._connection: Any = None
        self._trusted = False
        self._busy = False
        self._began = 0.0
        self._watching: asyncio.TimerHandle | None = None
        self._silent = False
        """Whether the call under way was cut off."""

    @property
    def ready(self) -> bool:
        """Whether a call makes sense now."""
        return self._trusted and not self._busy

    def trust(self) -> None:
        """The server has answered somebody."""
        self._trusted = True

    async def call(self, *command: Any) -> Any:
        """Run a command whose answer needs no translation.

        Raises:
            RedisError: what the server answers, or that it does not.
            TimeoutError: no connection could be had in time.
        """
        self._busy = True
        try:
            if self._connection is None:
                async with asyncio.timeout(self._within_s):
                    self._connection = await self._pool.get_connection()
            self._watch(asyncio.get_running_loop())
            return await self._connection.exchange(command)
        except BaseException:  # also when cancelled: an answer may be on its way
            await self._end()
            raise
        finally:
            self._busy = False

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the call that begins cut off in time.

        By one timer for all calls: with one each, calls cost twice as much.
        """
        self._began = loop.time()

        def look() -> None:
            self._watching = None
            if self._busy:
                left = self._began + self._within_s - loop.time()
                if left > 0:
                    self._watching = loop.call_later(left, look)
                elif self._connection is not None:
                    self._silent = True
                    self._connection.abort()

        if self._watching is None:
            self._watching = loop.call_later(self._within_s, look)

    async def _end(self) -> None:
        self._trusted = False
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)
        if self._silent:  # those that were idle meanwhile are no better
            self._silent = False
            await self._pool.disconnect(inuse_connections=False)


class PlainSpoken:
    """Mixed into redis-py's connections: uvloop has a word of its own for a lost one."""

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """As redis-py's; one that was reset or closed a moment ago is a lost connection too."""
        untyped: Any = super()
        try:
            await untyped.send_packed_command(command, check_health)
        except RuntimeError as error:
            raise RedisConnectionError(str(error)) from error
        except AttributeError as error:  # redis-py looks for a writer that is no more
            if untyped._writer is not None:
                raise
            raise RedisConnectionError("The connection was closed meanwhile.") from error

    async def exchange(self, command: tuple[Any, ...]) -> Any:
        """One command on a connection that nobody else uses; its answer as it comes.

        Raises:
            RedisError: what the server answers, or that the connection is lost.
        """
        untyped: Any = self
        if not untyped.is_connected:
            raise RedisConnectionError("The connection was closed.")
        try:
            untyped._writer.write(_hiredis.pack_command(command))
            answer = await untyped._parser.read_response()
        except RuntimeError as error:
            raise RedisConnectionError(str(error)) from error
        if isinstance(answer, ResponseError):
            raise answer
        return answer

    def abort(self) -> None:
        """Lose the connection, so that who waits for an answer hears of it."""
        untyped: Any = self
        if untyped.is_connected:
            untyped._writer.transport.abort()
