"""A subscription to one sharded channel that lasts: it connects again as often as it takes.

What is published while it is down is lost, so its owner is told of every (re)connection and must
look at the truth (a log, a queue) again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from millstream.shared.connection import TRANSIENT_ERRORS, RedisError, open_subscriber

logger = logging.getLogger(__name__)

RECONNECT_FIRST_S, RECONNECT_MOST_S = 0.05, 2.0
OPEN_S = 4.0
# One that has not heard its own pulse for so long is dead, whatever TCP thinks.
PULSE_LOST_S = 4.0
_PULSE = b"pulse"


async def _as_it_is(message: Any) -> Any:
    """Stands in for redis-py's handler, which writes each message out for a log nobody keeps."""
    return message


class Subscription:
    """One connection that listens on one sharded channel, wherever its slot lies.

    Args:
        redis_url: Where Redis is.
        channel: What to listen on.
        on_open: Called when the channel is subscribed, the first time and after every loss.
        on_message: Called with each message's payload.
        on_pulse: Called when our own pulse is heard.
    """

    def __init__(
        self,
        redis_url: str,
        channel: str,
        *,
        on_open: Callable[[], None],
        on_message: Callable[[bytes], None],
        on_pulse: Callable[[], None] = lambda: None,
    ) -> None:
        self._redis_url = redis_url
        self._channel = channel
        self._on_open = on_open
        self._on_message = on_message
        self._on_pulse = on_pulse
        self._pubsub: Any = None
        self._heard_at = 0.0
        self._unheard_since: float | None = None
        """When the first pulse was sent that has not come back."""
        self.opened = 0
        """How often it was subscribed: once, and again after every loss."""

    @property
    def open(self) -> bool:
        """Whether it hears what is published now, as far as it knows."""
        return self._pubsub is not None

    async def run(self) -> None:
        """Listen for ever; cancel to end."""
        delay = RECONNECT_FIRST_S
        while True:
            try:
                async with open_subscriber(self._redis_url, self._channel) as opened:
                    client: Any = opened  # redis-py does not type what it reads
                    pubsub = client.pubsub(push_handler_func=_as_it_is)
                    try:
                        async with asyncio.timeout(OPEN_S):
                            await pubsub.ssubscribe(self._channel)
                            await pubsub.parse_response(block=True)  # from now on we are heard of
                        self._pubsub = pubsub
                        delay = RECONNECT_FIRST_S
                        self.opened += 1
                        self._unheard_since = None
                        self._on_open()
                        await self._listen(pubsub)
                    finally:
                        self._pubsub = None
                        await pubsub.aclose()
            except (RedisError, *TRANSIENT_ERRORS) as error:
                logger.debug("subscription lost: %s", error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, RECONNECT_MOST_S)

    async def _listen(self, pubsub: Any) -> None:
        while True:
            message: list[Any] = await pubsub.parse_response(block=True)
            if message[0] == b"smessage":
                self._heard_at, self._unheard_since = time.monotonic(), None
                if message[2] == _PULSE:
                    self._on_pulse()
                else:
                    self._on_message(message[2])
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
            await self.drop()

    async def drop(self) -> None:
        """Give up the present connection, which is dead, and make a new one."""
        if self._pubsub is not None and self._pubsub.connection is not None:
            await self._pubsub.connection.disconnect(nowait=True)
