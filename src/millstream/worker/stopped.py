"""The stops this worker was told of, to put them back should Redis lose them."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from millstream.shared.connection import RedisError
from millstream.shared.events import Event
from millstream.shared.keys import Keys
from millstream.shared.schemas import shard_of
from millstream.shared.scripts import Scripts

logger = logging.getLogger(__name__)

MOST = 256  # stops; no clock: to put back what was never lost changes nothing
MOST_LEFT = 64  # tasks; a stop comes within milliseconds of the refusal
MOST_EVENTS = 512  # of one task; as pods keep of what they showed
PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Stop:
    """A task that was stopped while it ran here, as its control channel says."""

    task_id: str
    attempt: int
    seq: int
    """The number of its last event; 0 from who does not say so."""
    data: str
    """What that event says."""


class Stopped:
    """The ends of tasks that were stopped here, with the last of their texts.

    The pod that confirmed a stop puts it back as well; but it may die with Redis, and of what
    nobody had read it has no text.

    Args:
        scripts: The atomic steps.
        result_ttl_s: How long an ended task can be read.
    """

    def __init__(self, scripts: Scripts, *, result_ttl_s: int) -> None:
        self._scripts = scripts
        self._result_ttl_s = result_ttl_s
        self._tails: dict[str, list[Event]] = {}
        """By task; those told first come first."""
        self._left: dict[str, Sequence[tuple[str, str]]] = {}
        self._due: set[int] = set()
        self._wake = asyncio.Event()

    def left(self, request_id: str, events: Sequence[tuple[str, str]]) -> None:
        """A task has left this worker, with (ids, data) of all its events so far.

        Whether it was stopped is said on another connection, maybe after a refused append.
        """
        self._left[request_id] = events
        if len(self._left) > MOST_LEFT:
            del self._left[next(iter(self._left))]

    def note(self, stop: Stop) -> None:
        """A task that has left was stopped."""
        events = self._left.pop(f"{stop.task_id}:{stop.attempt}", ())
        if not 0 < stop.seq <= len(events) + 1:
            return
        first = max(1, stop.seq - MOST_EVENTS)
        tail = [
            Event(seq, "t", *event)
            for seq, event in enumerate(events[first - 1 : stop.seq - 1], first)
        ]
        self._tails[stop.task_id] = [*tail, Event(stop.seq, "cancelled", "", stop.data)]
        if len(self._tails) > MOST:
            del self._tails[next(iter(self._tails))]

    def doubt(self, shard: int) -> None:
        """The connection to a shard was lost: its Redis may be older than it was."""
        self._due.add(shard)
        self._wake.set()

    async def run(self) -> None:
        """Put back after each loss of a connection, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            due, self._due = self._due, set()
            for shard in due:
                try:
                    await self._put_back(shard)
                except RedisError as error:
                    logger.debug("put back: %s", error)
                    self.doubt(shard)
                    await asyncio.sleep(PAUSE_S)

    async def _put_back(self, shard: int) -> None:
        for task_id, events in list(self._tails.items()):
            if shard_of(task_id) == shard:
                await self._scripts.restore(
                    Keys(shard), task_id=task_id, result_ttl_s=self._result_ttl_s, events=events
                )
