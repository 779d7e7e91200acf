"""Where waiting tasks stand: one look at a queue serves all readers of the pod for a while."""

import asyncio
import time

import msgspec

from millstream.shared.keys import Keys
from millstream.shared.schemas import shard_of
from millstream.shared.scripts import Scripts

LOOK_S = 1.0
MOST_IDS = 10_000


class _Look(msgspec.Struct, frozen=True):
    at: float
    positions: dict[str, int]
    place_s: float | None


class QueueWatch:
    """Answers position and expected wait from a look at the queue that is at most a second old."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self._looks: dict[tuple[int, str], _Look] = {}
        self._lock = asyncio.Lock()

    async def position(self, task_id: str, model: str) -> tuple[int, float | None] | None:
        """At which place it is served, from 1, and in how many seconds; None once it does not wait.

        Raises:
            RedisError: Redis does not answer.
        """
        key = (shard_of(task_id) or 0, model)
        async with self._lock:
            look = self._looks.get(key)
            if look is None or time.monotonic() - look.at > LOOK_S:
                view = await self._scripts.waiting(Keys(key[0]), model=model, count=MOST_IDS)
                look = self._looks[key] = _Look(
                    time.monotonic(),
                    {waiting: at for at, waiting in enumerate(view.waiting_ids, 1)},
                    view.place_s,
                )
        position = look.positions.get(task_id)
        if position is None:
            return None
        return position, None if look.place_s is None else position * look.place_s
