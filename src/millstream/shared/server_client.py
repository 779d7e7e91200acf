"""The client of one server, whose calls take turns; a script has a quicker way that it tries first.

redis-py takes a connection from its pool for each call, looks whether it is sound, starts two
timeouts, counts, and gives it back: 115 µs of CPU here, of which sending and receiving are 30. A
worker makes such a call each decode step, so one connection is kept aside for scripts.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import hiredis
import redis.asyncio
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
    ReadOnlyError,
    RedisError,
    TimeoutError as RedisTimeoutError,
)

from millstream.shared.turns import turn

LAST_LOOK_S = 0.05

_hiredis: Any = hiredis  # leaves untyped what it gives
_NOT_YET = object()

LineKind = TypeVar("LineKind", bound="Line")


class ServerClient(redis.asyncio.Redis):
    """A client whose calls take turns, and that leaves a server which has become a replica.

    redis-py's pool has turns for nobody: who gives a connection back and asks again at once has it
    before those who wait, for ever if there are enough of them. And it stays with a replica.

    Args:
        pool: A pool of connections.
        calls: How many it holds.
        wait_s: How long a call waits for its turn before it fails like an absent Redis.
        script_s: How long a script may take on the kept connection; a pool of one has none.
        repeats: Whether a script may be sent again where its answer was lost.
    """

    def __init__(
        self, pool: Any, *, calls: int, wait_s: float, script_s: float, repeats: bool
    ) -> None:
        base: Any = super()  # redis-py leaves some keywords untyped
        base.__init__(connection_pool=pool)
        self._wait_s = wait_s
        self.kept: KeptConnection | None = None
        """For scripts; None in a pool of one."""
        if calls > 1:
            self.kept = KeptConnection(pool, calls=calls, within_s=script_s, repeats=repeats)
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
    """A pool's connection that stays out of it; calls on it do not wait for each other's answers.

    It is left when it is lost, silent, or a replica's. There is a new one when somebody has had an
    answer otherwise: an absent Redis is not asked for twice as long.

    Args:
        pool: Whose connections are `PlainSpoken`.
        calls: How many may be under way.
        within_s: How long a call may take.
        repeats: Whether what failed here may be sent again another way.
    """

    def __init__(self, pool: Any, *, calls: int, within_s: float, repeats: bool) -> None:
        self.repeats = repeats
        self._pool = pool
        self._calls = calls
        self._within_s = within_s
        self._exchange: Exchange | None = None
        self._trusted = False
        self._connecting = False
        self._watching: asyncio.TimerHandle | None = None
        self._overdue: asyncio.Future[Any] | None = None
        """A call that was found to take too long at the last look."""

    @property
    def ready(self) -> bool:
        """Whether a call makes sense now."""
        if self._exchange is None:
            return self._trusted and not self._connecting
        return self._exchange.open < self._calls

    def trust(self) -> None:
        """The server has answered somebody."""
        self._trusted = True

    async def call(self, *command: Any) -> Any:
        """Run a command whose answer needs no translation.

        Raises:
            RedisError: what the server answers, or that it does not.
        """
        exchange = self._exchange or await self._connect()
        if self._watching is None:
            self._watch(self._within_s)
        try:
            return await exchange.ask(command)
        except (RedisConnectionError, ReadOnlyError):
            await self._end(exchange)
            raise

    async def _connect(self) -> "Exchange":
        self._connecting = True
        try:
            async with asyncio.timeout(self._within_s):
                self._exchange = await taken_over(self._pool, Exchange)
        except TimeoutError:
            raise RedisTimeoutError("No connection was made in time.") from None
        finally:
            self._connecting = False
            self._trusted = False
        return self._exchange

    def _watch(self, seconds: float) -> None:
        """Have calls cut off in time.

        By one timer for all: with one each, calls cost twice as much.
        """
        self._watching = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._watching = None
        exchange = self._exchange
        if exchange is None or exchange.oldest is None:
            return
        asked, asked_at = exchange.oldest
        left = asked_at + self._within_s - time.monotonic()
        if left <= 0 and asked is self._overdue:
            exchange.abort()
            return
        # Of a loop that was held up the timers are first: an answer may be there, not yet read.
        self._overdue = asked if left <= 0 else None
        self._watch(max(left, LAST_LOOK_S))

    async def _end(self, exchange: "Exchange") -> None:
        """Leave a connection: who comes first does it, of all whose calls it fails."""
        if self._exchange is not exchange:
            return
        self._exchange = None
        self._trusted = False
        await exchange.connection.disconnect(nowait=True)
        await self._pool.release(exchange.connection)
        if exchange.silent:  # those that were idle meanwhile are no better
            await self._pool.disconnect(inuse_connections=False)


class Line(asyncio.Protocol, ABC):
    """A connection past redis-py's stream and parser; redis-py has made it, and closes it.

    Args:
        connection: Of redis-py; from now on nobody else's.

    Raises:
        RedisError: it is closed already.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._lost = False
        self._reader: Any = _hiredis.Reader(
            replyError=connection._parser.parse_error, notEnoughData=_NOT_YET
        )
        # A transport that was lost before would tell nobody, and swallow what is written.
        reader, writer = connection._reader, connection._writer
        if writer is None or writer.is_closing() or reader.at_eof() or reader.exception():
            raise RedisConnectionError("The connection was closed meanwhile.")
        self._transport: Any = writer.transport
        self._before: Any = self._transport.get_protocol()
        """What redis-py reads by; it waits for the end where redis-py closes."""
        self._transport.set_protocol(self)

    def say(self, command: tuple[Any, ...]) -> None:
        """Send a command.

        Raises:
            RedisError: the connection is lost already.
        """
        if self._lost:
            raise RedisConnectionError("The connection was closed.")
        try:
            self._transport.write(_hiredis.pack_command(command))
        except RuntimeError as error:  # uvloop's word
            raise RedisConnectionError(str(error)) from error

    def data_received(self, data: bytes) -> None:
        """Answers and messages, or parts of them."""
        self._reader.feed(data)
        while (answer := self._reader.gets()) is not _NOT_YET:
            self.take(answer)

    @abstractmethod
    def take(self, answer: Any) -> None:
        """Do with an answer or a message what is to be done."""

    @abstractmethod
    def end(self) -> None:
        """Tell who waits that nothing will come any more; may be called again."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell redis-py, and who waits."""
        self._lost = True
        self._before.connection_lost(exc)
        self.end()

    def abort(self) -> None:
        """Lose the connection, whether or not the transport tells of it."""
        self._lost = True
        self._transport.abort()
        self.end()


async def taken_over(pool: Any, kind: Callable[[Any], LineKind]) -> LineKind:
    """A connection of redis-py's pool that is read by a `Line`.

    Raises:
        RedisError: none can be had.
    """
    connection = await pool.get_connection()
    try:
        return kind(connection)
    except RedisConnectionError:
        await connection.disconnect(nowait=True)
        await pool.release(connection)
        raise


class Exchange(Line):
    """A connection on which one asks and is answered.

    Answers come in the order of the questions; that of a caller who has gone is dropped.

    Args:
        connection: As `Line`.
    """

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self.silent = False
        """Whether it was given up for its silence."""
        self._asking: deque[tuple[asyncio.Future[Any], float]] = deque()

    @property
    def open(self) -> int:
        """How many answers have not come."""
        return len(self._asking)

    @property
    def oldest(self) -> "tuple[asyncio.Future[Any], float] | None":
        """Who waits for the first of them, and since when by the monotonic clock."""
        return self._asking[0] if self._asking else None

    def ask(self, command: tuple[Any, ...]) -> "asyncio.Future[Any]":
        """Send a command; its answer, to wait for.

        It may raise the RedisError that the server answers, or that the connection is lost.

        Raises:
            RedisError: it is lost already.
        """
        self.say(command)
        future = asyncio.get_running_loop().create_future()
        self._asking.append((future, time.monotonic()))
        return future

    def take(self, answer: Any) -> None:
        """Give it to who has waited longest."""
        if isinstance(answer, _hiredis.PushNotification):
            return  # nobody has asked for it
        future, _ = self._asking.popleft()
        if future.done():
            return
        if isinstance(answer, RedisError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def end(self) -> None:
        """Tell all who wait."""
        for future, _ in self._asking:
            if not future.done():
                future.set_exception(RedisConnectionError("The connection was lost."))
        self._asking.clear()

    def abort(self) -> None:
        """Lose it, for it is silent."""
        self.silent = True
        super().abort()


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
