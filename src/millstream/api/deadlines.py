"""Ends the tasks whose time is up, whether any worker lives."""

import asyncio
import logging

from millstream.shared.connection import RedisError
from millstream.shared.keys import Keys
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # how late a deadline may be seen that another pod has taken in
PAUSE_S = 0.01  # while more are due than one call ends


class Deadlines:
    """Looks at each shard by itself: one whose node is away holds up no other."""

    def __init__(self, scripts: Scripts, settings: Settings) -> None:
        self._scripts = scripts
        self._settings = settings

    async def run(self) -> None:
        """Look until cancelled, at each deadline and once a second."""
        async with asyncio.TaskGroup() as group:
            for shard in range(self._settings.shards):
                group.create_task(self._watch(Keys(shard)), name=f"deadlines {shard}")

    async def _watch(self, shard: Keys) -> None:
        while True:
            try:
                left = await self._scripts.end_due(shard, result_ttl_s=self._settings.result_ttl_s)
            except RedisError as error:
                logger.debug("deadlines: %s", error)
                left = None
            await asyncio.sleep(LOOK_S if left is None else min(LOOK_S, left + PAUSE_S))
