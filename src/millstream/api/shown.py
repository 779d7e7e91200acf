"""What this pod has told within the last seconds, to put it back should Redis lose it.

Redis can lose the last second or two of what it has acknowledged (`appendfsync everysec`, or a
failover to a replica). Whoever saw an event, saw it through a pod: so the pods keep what they
showed for a little longer than that, and write it again after each loss of the connection.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from millstream.shared.events import Event
from millstream.shared.keys import Keys
from millstream.shared.schemas import shard_of
from millstream.shared.scripts import Scripts
from millstream.shared.steps import SHORT

logger = logging.getLogger(__name__)

# Redis syncs its file once a second, and up to a second later when the disk is slow. What is older
# is forgotten once a second, so it is up to a second more.
KEEP_S = 3.0
MOST_EVENTS = 512  # of one task; bounds what a reader that rushes through a long log leaves here

# How long a stop waits for the text that was there before it: workers and other pods put that back
# as soon as they are connected again. Less than readers wait for it (`relay.HEAL_S`).
TEXT_S = 4.0
AT_ONCE = 8  # calls; half the connections of the pod


class _Tail(msgspec.Struct):
    """The last events of one log that a reader of this pod was given."""

    last: int
    """The number of the last of them."""
    events: list[Event] = msgspec.field(default_factory=list[Event])
    marks: list[tuple[float, int]] = msgspec.field(default_factory=list[tuple[float, int]])
    """By when which number had been given; noted now and then, as time costs more than a token."""

    def forget(self, before: float) -> None:
        """Let go of what had been given before a moment."""
        upto = 0
        while self.marks and self.marks[0][0] <= before:
            _, upto = self.marks.pop(0)
        if self.events and upto >= self.events[0].seq:
            del self.events[: upto + 1 - self.events[0].seq]


class _End(msgspec.Struct):
    """A task whose end its caller was told, and the script that brings it about."""

    told_at: float
    caller: str
    script: Callable[..., Awaitable[object]]
    tokens: int = 0
    """How many the caller was told that there are."""
    short_since: float | None = None
    """When the log was first found to have fewer."""


class Shown:
    """Events that were sent, stops and deletes that were confirmed, in Redis's last seconds."""

    def __init__(self, scripts: Scripts, *, result_ttl_s: int) -> None:
        self._scripts = scripts
        self._result_ttl_s = result_ttl_s
        self._tails: dict[str, _Tail] = {}
        self._ends: dict[str, _End] = {}

    def note(self, task_id: str, events: Sequence[Event]) -> None:
        """A reader is given these events of a log, which follow each other."""
        tail, first = self._tails.get(task_id), events[0].seq
        if tail is None or first > tail.last + 1:
            tail = self._tails[task_id] = _Tail(first - 1)
        if first <= tail.last:  # another reader had some before
            events = events[tail.last + 1 - first :]
        tail.events += events
        tail.last += len(events)
        if len(tail.events) > MOST_EVENTS:
            del tail.events[:-MOST_EVENTS]

    def note_stop(self, task_id: str, caller: str, *, tokens: int) -> None:
        """A caller was told that its task is stopped, after so many tokens."""
        self._ends[task_id] = _End(time.monotonic(), caller, self._scripts.stop, tokens)

    def note_delete(self, task_id: str, caller: str) -> None:
        """A caller was told that its task is deleted."""
        self._ends[task_id] = _End(time.monotonic(), caller, self._scripts.delete)

    def forget_old(self, shard: int) -> None:
        """A shard's Redis has lived on: what is older than it could lose needs no keeping."""
        now = time.monotonic()
        oldest = now - KEEP_S
        for task_id, tail in list(self._tails.items()):
            if shard_of(task_id) != shard:
                continue
            tail.marks.append((now, tail.last))
            tail.forget(oldest)
            if not tail.events:
                del self._tails[task_id]
        for task_id, end in list(self._ends.items()):
            if end.told_at < oldest and shard_of(task_id) == shard:
                del self._ends[task_id]

    async def put_back(self, shard: int, *, done: set[str]) -> tuple[list[str], bool]:
        """Write again what a shard's Redis may lack; the tasks whose logs have gone on otherwise.

        Also whether there are stops left that wait for texts which others have: then it is to be
        called again soon.

        Args:
            shard: The shard.
            done: Tasks that were put back since the connection was lost, which are left out. It
                grows, so that a call after an error goes on from where the last one came to.

        Raises:
            RedisError: Redis does not answer; nothing is forgotten, so it may be tried again.
        """
        tails = {
            task_id: [*tail.events]
            for task_id, tail in self._tails.items()
            if shard_of(task_id) == shard
        }
        ends = {task_id: end for task_id, end in self._ends.items() if shard_of(task_id) == shard}
        changed: list[str] = []
        waiting = False

        async def write_again(task_id: str) -> None:
            nonlocal waiting
            answer = "whole"
            if task_id in tails:
                answer = await self._scripts.restore(
                    Keys(shard),
                    task_id=task_id,
                    result_ttl_s=self._result_ttl_s,
                    events=tails[task_id],
                )
            ended = task_id not in ends or await self._end_again(shard, task_id, ends[task_id])
            if answer == "other":
                changed.append(task_id)  # and asked again after an error, to be told in the end
            elif ended:
                done.add(task_id)
            else:
                waiting = True

        left = [task_id for task_id in {**tails, **ends} if task_id not in done]
        for at in range(0, len(left), AT_ONCE):
            calls = (write_again(task_id) for task_id in left[at : at + AT_ONCE])
            for error in await asyncio.gather(*calls, return_exceptions=True):
                if error is not None:
                    raise error
        # What has just been put back is as easily lost again as what was just told.
        for task_id in tails.keys() & self._tails.keys():
            self._tails[task_id].marks.clear()
        now = time.monotonic()
        for told in ends.values():
            told.told_at = now
        self._ends = {**ends, **self._ends}
        if changed:
            logger.warning("Redis has lost events of %d tasks that were shown", len(changed))
        return changed, waiting

    async def _end_again(self, shard: int, task_id: str, end: _End) -> bool:
        """Bring an end about again, unless its text is still to come."""
        now = time.monotonic()
        waits = end.tokens > 0 and (end.short_since is None or now - end.short_since < TEXT_S)
        answer = await end.script(
            Keys(shard),
            task_id=task_id,
            caller=end.caller,
            result_ttl_s=self._result_ttl_s,
            **({"least_tokens": end.tokens} if waits else {}),
        )
        if waits and answer == SHORT:
            end.short_since = end.short_since or now
            return False
        end.short_since = None
        return True
