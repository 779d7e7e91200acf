"""Listens on the worker's control channel: bells and stops. Both are hints; polls catch the rest."""

import asyncio
import logging
from collections.abc import Callable

from millstream.shared.connection import TRANSIENT_ERRORS, RedisError, open_subscriber
from millstream.shared.keys import Keys

logger = logging.getLogger(__name__)

RECONNECT_FIRST_S, RECONNECT_MOST_S = 0.05, 2.0


async def listen(
    redis_url: str,
    *,
    worker_id: str,
    shards: int,
    on_bell: Callable[[bool], None],
    on_stop: Callable[[str, int], None],
) -> None:
    """Listen for ever, connecting again as often as it takes.

    Args:
        redis_url: Where Redis is.
        worker_id: Whose channel.
        shards: How many shards the fleet has.
        on_bell: Called when there may be work; True when it may be another worker's.
        on_stop: Called with task id and attempt of a task that has been stopped.
    """
    delay = RECONNECT_FIRST_S
    while True:
        client = open_subscriber(redis_url)
        pubsub = client.pubsub()
        try:
            await pubsub.ssubscribe(*(Keys(shard).control(worker_id) for shard in range(shards)))
            delay = RECONNECT_FIRST_S
            on_bell(True)  # what was rung while nobody listened
            while True:
                message = await pubsub.parse_response(block=True)
                if message is None or message[0] != b"smessage":
                    continue
                word, *rest = message[2].decode().split(" ")
                if word == "stop":
                    on_stop(rest[0], int(rest[1]))
                else:
                    on_bell(word == "released")
        except (RedisError, *TRANSIENT_ERRORS) as error:
            logger.debug("control channel: %s", error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, RECONNECT_MOST_S)
        finally:
            await pubsub.aclose()
            await client.aclose()
