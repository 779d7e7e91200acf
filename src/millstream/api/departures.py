"""What becomes of tasks whose readers went away: those that nobody else wants are ended."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from millstream.api.feed import Feed
from millstream.shared.errors import ExpiredTask, UnknownTask

logger = logging.getLogger(__name__)

STOP_TRIES = 20
STOP_PAUSE_S = 0.5
# EventSource connects again by itself, 3 s (Chrome) or 5 s (Firefox) after a cut if the stream did
# not say when, and a phone that changes its network takes some seconds more.
COME_BACK_S = 10.0


class Departures:
    """Ends what was left, after its grace.

    A pod that goes while a grace lasts leaves the rest to the fleet: a task that belongs to a
    connection ends when no pod has followed it for a while (`append`).

    Args:
        stop: Ends a task that was `left`, by its id and caller; `for_now`: if nobody else wants it.
        feed: Knows who reads here.
        spawn: Runs a coroutine that goes on by itself, under a name.
        grace_s: How long `left` waits.
    """

    def __init__(
        self,
        stop: Callable[..., Awaitable[object]],
        feed: Feed,
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
        *,
        grace_s: float,
    ) -> None:
        self._stop = stop
        self._feed = feed
        self._spawn = spawn
        self._grace_s = grace_s
        self._coming_back: dict[str, asyncio.TimerHandle] = {}

    def left(self, task_id: str, caller: str, *, for_now: bool) -> None:
        """The client that the answer was for is gone; `for_now`: it may come back to any pod."""
        loop = asyncio.get_running_loop()
        if not for_now:
            loop.call_later(self._grace_s, self._end, task_id, caller)
            return
        if earlier := self._coming_back.get(task_id):
            earlier.cancel()
        grace_s = max(COME_BACK_S, self._grace_s)
        self._coming_back[task_id] = loop.call_later(
            grace_s, self._end_unless_back, task_id, caller
        )

    def _end_unless_back(self, task_id: str, caller: str) -> None:
        del self._coming_back[task_id]
        if not self._feed.follows(task_id):
            self._end(task_id, caller, for_now=True)

    def _end(self, task_id: str, caller: str, *, for_now: bool = False) -> None:
        async def end() -> None:
            for _ in range(STOP_TRIES):
                try:
                    await self._stop(task_id, caller, left=True, for_now=for_now)
                except (UnknownTask, ExpiredTask):
                    return
                except Exception as error:
                    logger.debug("stop of %s: %s", task_id, error)
                    await asyncio.sleep(STOP_PAUSE_S)
                else:
                    return

        self._spawn(end(), f"stop {task_id}")
