"""A subscription to sharded channels that lasts: it connects again as often as it takes.

What is published while it is down is lost, so its owner is told of every (re)connection and must
look at the truth (a log, a queue) again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from millstream.shared.connection import TRANSIENT_ERRORS, RedisError, open_subscriber
from millstream.shared.server_client import Line, taken_over

logger = logging.getLogger(__name__)

RECONNECT_FIRST_S, RECONNECT_MOST_S = 0.05, 2.0
OPEN_S = 4.0
# One that has not heard its own pulse for so long is dead, whatever TCP thinks.
PULSE_LOST_S = 4.0
_PULSE = b"pulse"


class _Listening(Line):
    """A connection that only listens: whoever wants the messages is called with each.

    Args:
        connection: As `Line`.
        heard: What is called. An error that it raises ends the connection.
    """

    def __init__(self, connection: Any, heard: Callable[[list[Any]], None]) -> None:
        super().__init__(connection)
        self._heard = heard
        self.ended: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Why it is of no use any more."""

    def take(self, answer: Any) -> None:
        """Tell of a message, for as long as it makes sense."""
        if self.ended.done():
            return
        try:
            if isinstance(answer, RedisError):
                raise answer
            self._heard(answer)
        except Exception as error:  # raised where the end is waited for
            self.ended.set_result(error)

    def end(self) -> None:
        """Tell who waits for the end."""
        if not self.ended.done():
            self.ended.set_result(RedisConnectionError("The connection was lost."))


class Subscription:
    """One connection that listens on sharded channels of one slot, wherever it lies.

    Args:
        redis_url: Where Redis is.
        channel: What to listen on.
        on_open: Called when all is subscribed, the first time and after every loss.
        on_message: Called with the payload of each message on the channel.
        on_pulse: Called when our own pulse is heard.
        more: What else to listen on, and what is called with the payloads of that.
    """

    def __init__(
        self,
        redis_url: str,
        channel: str,
        *,
        on_open: Callable[[], None],
        on_message: Callable[[bytes], None],
        on_pulse: Callable[[], None] = lambda: None,
        more: Mapping[str, Callable[[bytes], None]] | None = None,
    ) -> None:
        self._redis_url = redis_url
        self._channel = channel
        self._on_open = on_open
        handlers = {channel: on_message, **(more or {})}
        self._handlers = {name.encode(): handle for name, handle in handlers.items()}
        self._on_pulse = on_pulse
        self._line: _Listening | None = None
        self._heard_at = 0.0
        self._unheard_since: float | None = None
        """When the first pulse was sent that has not come back."""
        self.opened = 0
        """How often it was subscribed: once, and again after every loss."""
        self.open = False
        """Whether it hears what is published now, as far as it knows."""

    async def run(self) -> None:
        """Listen for ever; cancel to end."""
        delay = RECONNECT_FIRST_S
        while True:
            before = self.opened
            try:
                async with open_subscriber(self._redis_url, self._channel) as client:
                    await self._listen(client.connection_pool)
            except (RedisError, *TRANSIENT_ERRORS) as error:
                logger.debug("subscription lost: %s", error)
            if self.opened > before:
                delay = RECONNECT_FIRST_S
            await asyncio.sleep(delay)
            delay = min(2 * delay, RECONNECT_MOST_S)

    async def _listen(self, pool: Any) -> None:
        """Listen until that ends; raises what ended it."""
        async with asyncio.timeout(OPEN_S):
            self._line = line = await taken_over(pool, partial(_Listening, heard=self._heard))
        timer = asyncio.get_running_loop().call_later(OPEN_S, self._expect_open)
        try:
            line.say(("SSUBSCRIBE", *self._handlers))
            raise await line.ended
        finally:
            timer.cancel()
            self._line = None
            self.open = False
            await line.connection.disconnect(nowait=True)
            await pool.release(line.connection)

    def _expect_open(self) -> None:
        if not self.open:
            self.drop()

    def _heard(self, message: list[Any]) -> None:
        if message[0] == b"smessage":
            self._heard_at, self._unheard_since = time.monotonic(), None
            if message[2] == _PULSE:
                self._on_pulse()
            else:
                self._handlers[message[1]](message[2])
        elif message[0] == b"ssubscribe":
            if message[2] < len(self._handlers):
                return
            self.open = True  # from now on we are heard of
            self.opened += 1
            self._unheard_since = None
            self._on_open()
        elif message[0] == b"sunsubscribe":
            raise RedisConnectionError("the channel's slot has moved to another node")

    async def prove(self, publish: Callable[[str, bytes], Awaitable[int]]) -> None:
        """Send a pulse, and connect again where it would not be, or has not been, heard.

        Nobody is subscribed on the server that takes it, though we are open: after a failover we
        are with the old primary, which may well pass on what it hears.

        Args:
            publish: Sends a payload on a channel, and says how many are subscribed.
        """
        was_open = self.open
        sent_at = time.monotonic()
        try:
            listeners = await publish(self._channel, _PULSE)
        except RedisError:
            return  # Redis is away; we will notice as well
        if listeners > 0 and self._heard_at < sent_at and self._unheard_since is None:
            self._unheard_since = sent_at
        silent = self._unheard_since is not None and sent_at - self._unheard_since > PULSE_LOST_S
        if silent or (listeners == 0 and was_open and self.open):
            logger.warning("the subscription is deaf; connecting again")
            self._unheard_since = None
            self.drop()

    def drop(self) -> None:
        """Give up the present connection, which is dead, and make a new one."""
        if self._line is not None:
            self._line.abort()
