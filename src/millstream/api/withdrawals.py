"""Takes back tasks that were submitted and not confirmed: their callers were told 503."""

import asyncio
from collections.abc import Sequence

from millstream.shared.connection import RedisError
from millstream.shared.keys import Keys
from millstream.shared.schemas import shard_of
from millstream.shared.scripts import Scripts

PAUSE_S = 0.25
AT_ONCE = 4  # calls; the pod has others to make when its Redis is back
MOST = 10_000  # tasks; some 2 MB. Redis is not asked for tasks any more long before that


class Withdrawals:
    """The tasks of this pod of which nobody knows whether Redis has them, or will.

    A frozen Redis, or one that was cut off, may take up a submit long after its pod has given up
    on it. Whoever was told 503 sends the request again, and would be served twice.
    """

    def __init__(self, scripts: Scripts, *, result_ttl_s: int) -> None:
        self._scripts = scripts
        self._result_ttl_s = result_ttl_s
        self._callers: dict[str, str] = {}
        """By task; the oldest first."""
        self._wake = asyncio.Event()

    def add(self, task_ids: Sequence[str], caller: str) -> None:
        """The submit of these tasks of one answer, which are taken all or none, had no answer."""
        for task_id in task_ids:
            self._callers[task_id] = caller
        while len(self._callers) > MOST:
            del self._callers[next(iter(self._callers))]
        self._wake.set()

    async def run(self) -> None:
        """Withdraw for the pod's whole life, as often as it takes."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            left = list(self._callers.items())
            for at in range(0, len(left), AT_ONCE):
                await asyncio.gather(*(self._withdraw(*pair) for pair in left[at : at + AT_ONCE]))
            if self._callers:
                self._wake.set()
                await asyncio.sleep(PAUSE_S)

    async def _withdraw(self, task_id: str, caller: str) -> None:
        try:
            await self._scripts.delete(
                Keys(shard_of(task_id) or 0),
                task_id=task_id,
                caller=caller,
                result_ttl_s=self._result_ttl_s,
                withdraw=True,
            )
        except RedisError:
            return  # it stays, for the next round
        del self._callers[task_id]
