"""A task's events for one reader: the log from where it left off, then what comes, gapless."""

import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from io import StringIO

import msgspec

from millstream.api.feed import Feed, Reader
from millstream.api.silence import Silence
from millstream.shared.connection import RedisError, is_full
from millstream.shared.errors import (
    EventOutOfRange,
    ExpiredTask,
    LogIncomplete,
    LogRewound,
    LostTask,
    RedisUnavailable,
    UnknownTask,
)
from millstream.shared.events import TOKEN, Event
from millstream.shared.keys import Keys
from millstream.shared.schemas import shard_of
from millstream.shared.scripts import Scripts
from millstream.shared.states import TaskState
from millstream.shared.steps import LogPage

logger = logging.getLogger(__name__)

PAGE = 256  # events read at once: bounds the memory of a reader that is far behind
# The subscription has a watchdog of its own; this only bounds what a bug in it would cost.
RECHECK_S = 15.0
# How long a log may be shorter than what was given of it: a worker writes again what is missing
# with its next step, a pod as soon as it is connected.
HEAL_S = 5.0
RETRY_FIRST_S, RETRY_MOST_S = 0.1, 2.0


class SoFar(msgspec.Struct, frozen=True):
    """What a task's log holds at a moment."""

    state: TaskState
    text: str
    last: Event | None
    """The terminal event, once there is one."""


class Relay:
    """Reads logs and follows them."""

    def __init__(self, scripts: Scripts, feed: Feed) -> None:
        self._scripts = scripts
        self._feed = feed
        self.resumes = 0
        """Readers that began after some event."""
        self.log_reads = 0
        """How often a reader that was behind read the log."""
        self.rewinds = 0
        """Readers told that Redis has lost what they had, or what they asked for."""

    async def page(
        self, task_id: str, caller: str, *, after: int, follow: bool = False, count: int = PAGE
    ) -> LogPage:
        """Events after a number, and how the task stands.

        Raises:
            UnknownTask: there is none, or it is another caller's.
            ExpiredTask: there was one.
            LogRewound: Redis had lost events up to this number, and they came otherwise again.
            LogIncomplete: one of those asked for is missing.
            RedisUnavailable: Redis did not answer.
        """
        shard = shard_of(task_id)
        if shard is None:
            raise missing_task(task_id)
        try:
            page = await self._scripts.follow(
                Keys(shard),
                task_id=task_id,
                caller=caller,
                pod=self._feed.pod_id if follow else "",
                after=after,
                count=count,
            )
        except RedisError as error:
            raise unavailable(error) from error
        if isinstance(page, LogPage):
            return page
        if page == "rewound":
            raise self._rewound(task_id)
        if page == "torn":
            self.rewinds += 1
            raise LogIncomplete(
                f"The fleet's store has lost events of task {task_id}: its text cannot be had."
            )
        raise missing_task(task_id, expired=page == "expired")

    async def so_far(self, task_id: str, caller: str) -> SoFar:
        """The whole log as it stands; raises as `page`."""
        text = StringIO()
        after = 0
        while True:
            page = await self.page(task_id, caller, after=after)
            for event in page.events:
                if event.kind == TOKEN:
                    text.write(event.text)
            if not page.events:
                return SoFar(page.state, text.getvalue(), None)
            last = page.events[-1]
            if last.terminal:
                return SoFar(TaskState(last.kind), text.getvalue(), last)
            after = last.seq

    async def resumable(self, task_id: str, caller: str, *, after: int) -> LogPage | None:
        """How a task stands of which a client has seen so many events; None if that was all.

        Raises:
            EventOutOfRange: the log does not go so far.
            MillstreamError: as `page`.
        """
        page = await self.page(task_id, caller, after=after, count=1)
        if after > page.seq:
            raise EventOutOfRange(
                f"The log ends at event {page.seq}; {after} is ahead of it.", param="last_event_id"
            )
        return None if page.state.terminal and after == page.seq else page

    async def events(
        self,
        task_id: str,
        caller: str,
        *,
        after: int,
        silence: Silence,
        shortcut: Callable[[Sequence[Event]], bool] | None = None,
        expected: bool = False,
    ) -> AsyncGenerator[list[Event]]:
        """All events after a number, in order, each once, up to the terminal one; in batches.

        A batch is empty when nothing came for a tick of the silence, or when the pod wakes its
        readers: the moment to send a keepalive, or to leave. A Redis that is away is waited for.
        Raises as `page` for a task that is not there, and `LostTask` if it was, or was `expected`:
        made for this reader; and `LogRewound` where Redis has lost what was given before, and
        neither worker nor pod can put it back.

        What the `shortcut` takes while the next batch is waited for is in none. The log of a task
        that the feed has `expected` need not be read, from its first event on.
        """
        self.resumes += after > 0
        delay, known = RETRY_FIRST_S, False
        with self._feed.reading(task_id, shortcut, expected=expected) as reader:
            reader.next_seq = after + 1
            gap = _Gap()
            read_at, read_to = time.monotonic(), reader.next_seq
            while True:
                if reader.behind:
                    try:
                        page = await self._catch_up(reader, caller, gap)
                    except (UnknownTask, ExpiredTask) as error:
                        # Who was given no id yet has named no task, and one that was read is lost.
                        if not (expected or known):
                            raise
                        raise LostTask(f"The fleet's store has lost task {task_id}.") from error
                    if page is None:
                        woken = await reader.pause(delay * random.uniform(0.5, 1.0))  # noqa: S311
                        delay = RETRY_FIRST_S if woken else min(2 * delay, RETRY_MOST_S)
                        yield []
                        continue
                    delay, known = RETRY_FIRST_S, True
                    batch = page.events
                    next_seq = batch[-1].seq + 1 if batch else reader.next_seq
                    read_at, read_to = time.monotonic(), next_seq
                    reader.end_catch_up(next_seq)
                    if len(batch) == PAGE and not batch[-1].terminal:
                        reader.fall_behind()  # more to read
                    elif not batch and page.state.terminal and page.seq < next_seq:
                        return  # nothing after the number asked for
                else:
                    await reader.wait(silence.tick_s)
                    batch = reader.take()
                    if reader.next_seq != read_to:
                        read_at, read_to = time.monotonic(), reader.next_seq
                    elif time.monotonic() - read_at > RECHECK_S:
                        reader.fall_behind()
                if batch:
                    self._feed.note_given(task_id, batch)
                yield batch
                if batch and batch[-1].terminal:
                    return

    async def _catch_up(self, reader: Reader, caller: str, gap: "_Gap") -> LogPage | None:
        """Read the log on; None while Redis is away or its logs are doubtful."""
        next_seq = reader.next_seq
        if reader.rewound:
            raise self._rewound(reader.task_id)
        session = self._feed.session(reader.task_id)
        if session is None:
            return None
        reader.begin_catch_up()
        self.log_reads += 1
        try:
            page = await self.page(reader.task_id, caller, after=next_seq - 1, follow=True)
        except RedisUnavailable:
            reader.fall_behind()
            return None
        if gap.lies_between(page, next_seq):
            if gap.hopeless:
                raise self._rewound(reader.task_id)
        elif self._feed.session(reader.task_id) == session:
            return page
        reader.fall_behind()
        return None

    def _rewound(self, task_id: str) -> LogRewound:
        """What a reader is told whose events Redis has lost."""
        self.rewinds += 1
        return LogRewound(f"The fleet's store has lost events of task {task_id}; read it anew.")


class _Gap:
    """A log that lacks what was given of it: a worker or a pod is about to write it again."""

    def __init__(self) -> None:
        self._since: float | None = None
        self.hopeless = False

    def lies_between(self, page: LogPage, next_seq: int) -> bool:
        """Whether the log ends before what was given of it."""
        if page.seq >= next_seq - 1:
            self._since = None
            return False
        now = time.monotonic()
        self._since = self._since or now
        self.hopeless = page.state.terminal or now - self._since > HEAL_S
        return True


def unavailable(error: RedisError) -> RedisUnavailable:
    """What a caller is told when Redis does not do its part."""
    logger.debug("Redis: %s", error)
    if is_full(error):
        return RedisUnavailable("The fleet's store is full; try again.", retry_after_s=2)
    return RedisUnavailable("The fleet's store does not answer; try again.", retry_after_s=2)


def missing_task(task_id: str, *, expired: bool = False) -> UnknownTask | ExpiredTask:
    """What a caller is told of a task that it has not, or has no more."""
    if expired:
        return ExpiredTask(f"Task {task_id} has expired.", param="task_id")
    return UnknownTask(f"There is no task {task_id[:64]!r}.", param="task_id")
