"""Lets go of tasks, so that another worker goes on with them at once."""

import asyncio
from collections.abc import Sequence

from millstream.shared.connection import RedisError
from millstream.shared.keys import Keys
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings

RETRY_FIRST_S, RETRY_MOST_S = 0.05, 1.0


class Handover:
    """Releases a worker's tasks; while Redis is away, again and again.

    Args:
        scripts: The atomic steps.
        settings: The worker's.
        worker_id: Whose tasks they are.
    """

    def __init__(self, scripts: Scripts, settings: Settings, *, worker_id: str) -> None:
        self._scripts = scripts
        self._settings = settings
        self._worker_id = worker_id

    async def release(
        self,
        shard: int,
        tasks: Sequence[tuple[str, int]],
        *,
        blame: str = "",
        unheard: bool = False,
    ) -> int:
        """Let go of tasks (id, attempt) of a shard; how many were ours.

        With a reason in `blame` they are counted as lost. With `unheard` all else that is ours goes
        too: tasks that were started for us and of which we have not heard.
        """
        delay = RETRY_FIRST_S
        while True:
            try:
                return await self._scripts.release(
                    Keys(shard),
                    worker=self._worker_id,
                    model=self._settings.model_name,
                    lease_s=self._settings.lease_s,
                    blame=blame,
                    tasks=tasks,
                    unheard=unheard,
                )
            except RedisError:
                if not tasks:
                    return 0  # what we may have not heard of is not worth waiting for Redis
                await asyncio.sleep(delay)  # the drain's own time limit ends this
                delay = min(2 * delay, RETRY_MOST_S)
