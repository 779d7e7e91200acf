"""Telling a worker to drain: an order it finds at its next heartbeat, and a message at once."""

import logging

from millstream.shared import keys
from millstream.shared.connection import RedisError
from millstream.shared.keys import Keys
from millstream.shared.registry import heartbeat_ttl
from millstream.shared.scripts import Scripts

logger = logging.getLogger(__name__)

DRAIN = "drain"
"""The word on a worker's control channel."""

KEEP_S = 86_400
"""A worker that is frozen or cut off for so long still drains when it is back."""


async def order_drain(scripts: Scripts, worker_id: str, *, lease_s: float) -> bool:
    """Tell a worker to hand over and go; False where no such worker lives.

    It may be told again. The order is kept, so it does not matter whether the message arrives.

    Raises:
        RedisError: Redis does not answer, so the order is not certain.
    """
    found = await scripts.runner.run(
        "drain",
        [keys.WORKERS, keys.drain(worker_id)],
        [worker_id, int(heartbeat_ttl(lease_s) * 1000), KEEP_S],
    )
    if found == 1:
        try:
            await scripts.publish(Keys(0).control(worker_id), DRAIN.encode())
        except RedisError as error:
            logger.debug("a drain is found at the next heartbeat: %s", error)
    return found == 1
