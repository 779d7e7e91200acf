"""A subscription to one sharded channel that lasts: it connects again as often as it takes.

What is published while it is down is lost, so its owner is told of every (re)connection and must
look at the truth (a log, a queue) again.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from millstream.shared.connection import TRANSIENT_ERRORS, RedisError, open_subscriber

logger = logging.getLogger(__name__)

RECONNECT_FIRST_S, RECONNECT_MOST_S = 0.05, 2.0
OPEN_S = 4.0


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
    """

    def __init__(
        self,
        redis_url: str,
        channel: str,
        *,
        on_open: Callable[[], None],
        on_message: Callable[[bytes], None],
    ) -> None:
        self._redis_url = redis_url
        self._channel = channel
        self._on_open = on_open
        self._on_message = on_message
        self._pubsub: Any = None
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
                self._on_message(message[2])
            elif message[0] == b"sunsubscribe":
                raise RedisConnectionError("the channel's slot has moved to another node")

    async def drop(self) -> None:
        """Give up the present connection, which its owner knows to be dead, and make a new one."""
        if self._pubsub is not None and self._pubsub.connection is not None:
            await self._pubsub.connection.disconnect(nowait=True)
