"""What workers publish, handed to the readers of this pod.

The channel is a hint, the log is the truth: after any doubt (a reconnect, a gap in the numbers, a
full buffer) a reader is told that it is behind and reads the log again.
"""

import asyncio
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from millstream.api.channel import Channel
from millstream.api.shown import Shown
from millstream.shared.connection import RedisError
from millstream.shared.events import Event, decode_pod_message
from millstream.shared.keys import Keys
from millstream.shared.schemas import shard_of
from millstream.shared.scripts import Scripts

logger = logging.getLogger(__name__)

BUFFER_CHARS = 128 * 1024  # what a reader may be behind before it must read from the log
PULSE_S = 1.0


class Reader:
    """One open stream's place in a task's log: a bounded buffer of events in order.

    Args:
        task_id: The task.
        shortcut: Takes events straight from the feed while the reader's owner waits for some, and
            says whether it did; what it leaves is the owner's.
    """

    __slots__ = (
        "_buffer", "_size", "_tail", "_waiter", "_woken", "behind",
        "next_seq", "rewound", "shortcut", "task_id",
    )  # fmt: skip

    def __init__(
        self, task_id: str, shortcut: Callable[[Sequence[Event]], bool] | None = None
    ) -> None:
        self.task_id = task_id
        self.behind = True
        """The log must be read: the buffer misses something."""
        self.rewound = False
        """The log no longer holds what this pod has shown of it."""
        self.next_seq = 1
        """The number of the first event that has not been taken."""
        self._buffer: list[Event] = []
        self._size = 0
        self._tail: int | None = None
        self.shortcut = shortcut
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False

    def offer(self, events: list[Event]) -> bool:
        """Take new events from the feed, which follow each other, but for those already here.

        True asks for `flush`: the owner waits, and what has come may pass it by.
        """
        if self.behind:
            return False  # the log has them, and will be read
        first = events[0].seq
        if self._tail is None:
            self._tail = first
        if first != self._tail:
            if first > self._tail:
                self.fall_behind()
                return False
            events = events[self._tail - first :]
        self._tail += len(events)
        size = self._size
        for event in events:
            size += len(event.data)
        self._size = size
        if size > BUFFER_CHARS:
            self.fall_behind()
            return False
        alone = not self._buffer
        self._buffer += events
        if self.shortcut is None or self._waiter is None or self._waiter.done():
            self.wake()
            return False
        return alone

    def flush(self) -> Sequence[Event]:
        """Pass the buffer on by the shortcut; what went that way."""
        events = self._buffer
        waiting = self._waiter is not None and not self._waiter.done()
        if not events or not waiting or self.shortcut is None or not self.shortcut(events):
            self.wake()
            return ()
        return self._taken()

    def fall_behind(self) -> None:
        """Forget the buffer; the log has it all."""
        self._buffer = []
        self._size = 0
        self._tail = None
        self.behind = True
        self.wake()

    def begin_catch_up(self) -> None:
        """Gather events from now on, whatever their numbers; the log is about to be read."""
        self._buffer = []
        self._size = 0
        self._tail = None
        self.behind = False

    def end_catch_up(self, next_seq: int) -> None:
        """The log has been read up to `next_seq`; what came meanwhile must join on to it."""
        self.next_seq = next_seq
        if self.behind:
            return
        kept = [event for event in self._buffer if event.seq >= next_seq]
        if kept and kept[0].seq != next_seq:
            self.fall_behind()
            return
        self._buffer = kept
        self._size = sum(len(event.data) for event in kept)
        self._tail = next_seq + len(kept)

    def take(self) -> list[Event]:
        """All buffered events, maybe none."""
        self._woken = False
        return self._taken() if self._buffer else []

    def _taken(self) -> list[Event]:
        taken, self._buffer = self._buffer, []
        self._size = 0
        self.next_seq = taken[-1].seq + 1
        return taken

    def tell_rewound(self) -> None:
        """The log has gone on otherwise than was shown: nothing of it may follow."""
        self.rewound = True
        self.fall_behind()

    def wake(self) -> None:
        """End the wait without an event."""
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def pause(self, seconds: float) -> bool:
        """Wait for the next `wake`, or for so long; whether it was called."""
        self._woken = False
        await self._wait(seconds)
        return self._woken

    async def wait(self, seconds: float) -> None:
        """Wait for events, for falling behind, for `wake`, or for so long."""
        if not (self._buffer or self.behind or self._woken):
            await self._wait(seconds)

    async def _wait(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(seconds, _end_wait, self._waiter)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None


def _end_wait(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class Feed:
    """The pod's channels, and the readers it serves."""

    def __init__(
        self, redis_url: str, scripts: Scripts, shown: Shown, *, pod_id: str, shards: int
    ) -> None:
        self._channels = [
            Channel(
                redis_url,
                scripts,
                shown,
                shard=shard,
                pod_id=pod_id,
                on_open=partial(self._resume, shard),
                on_ready=partial(self._wake, shard),
                on_events=self._dispatch,
                on_rewound=self._tell_rewound,
            )
            for shard in range(shards)
        ]
        self._scripts = scripts
        self.shown = shown
        self.pod_id = pod_id
        self._readers: dict[str, set[Reader]] = {}
        self._left: set[str] = set()
        self._expected: dict[str, Reader] = {}
        """Readers of tasks that were just made, or are about to be: nobody owns them yet."""
        self._unclaimed: set[str] = set()
        """Those of them that were there at the last pulse."""
        self.given = 0
        """Events given to readers."""
        self._dirty: list[Reader] = []
        self._flushing = False

    def session(self, task_id: str) -> int | None:
        """In which unbroken connection a task's log may be read now, if it may."""
        return self._channels[shard_of(task_id) or 0].session

    @property
    def streams(self) -> int:
        """How many readers are open."""
        return sum(len(readers) for readers in self._readers.values())

    @property
    def reconnects(self) -> int:
        """How often a subscription was lost and made again."""
        return sum(channel.reconnects for channel in self._channels)

    def follows(self, task_id: str) -> bool:
        """Whether some reader here has the task open."""
        return task_id in self._readers

    @contextmanager
    def reading(
        self,
        task_id: str,
        shortcut: Callable[[Sequence[Event]], bool] | None = None,
        *,
        expected: bool = False,
    ) -> Generator[Reader]:
        """A reader of a task, which begins behind: its owner reads the log first.

        One that was `expected` has what came since, and is not behind unless something is missing.
        """
        reader = self._expected.pop(task_id, None) if expected else None
        reader = reader or self._open(task_id)
        reader.shortcut = shortcut
        try:
            yield reader
        finally:
            self._close(reader)

    def expect(self, task_ids: Sequence[str]) -> str:
        """Gather what comes of tasks of a shard from their making on, for who will read them.

        As whose follower they are to be made; empty where nothing would be heard. Readers that
        nobody owns two pulses later are closed.
        """
        if self.session(task_ids[0]) is None:
            return ""
        for task_id in task_ids:
            reader = self._expected[task_id] = self._open(task_id)
            reader.begin_catch_up()
            reader.end_catch_up(1)
        return self.pod_id

    def dismiss(self, task_ids: Sequence[str]) -> None:
        """These were not made: nobody follows them, so nobody need be told that they were left."""
        for task_id in task_ids:
            if reader := self._expected.pop(task_id, None):
                self._close(reader)
                self._left.discard(task_id)

    def _open(self, task_id: str) -> Reader:
        reader = Reader(task_id)
        self._readers.setdefault(task_id, set()).add(reader)
        self._left.discard(task_id)
        return reader

    def _close(self, reader: Reader) -> None:
        task_id = reader.task_id
        readers = self._readers[task_id]
        readers.discard(reader)
        if not readers:
            del self._readers[task_id]
            self._left.add(task_id)

    async def run(self) -> None:
        """Listen for the pod's whole life."""
        await asyncio.gather(*(channel.run() for channel in self._channels))

    def _of(self, shard: int) -> Iterator[Reader]:
        """The readers of a shard's tasks."""
        for task_id, readers in self._readers.items():
            if (shard_of(task_id) or 0) == shard:
                yield from readers

    def _resume(self, shard: int) -> None:
        """What a shard's tasks brought lately was not heard: their readers look into the log."""
        for reader in self._of(shard):
            reader.fall_behind()

    def _wake(self, shard: int) -> None:
        for reader in self._of(shard):
            reader.wake()

    def _tell_rewound(self, task_ids: list[str]) -> None:
        for task_id in task_ids:
            for reader in self._readers.get(task_id, ()):
                reader.tell_rewound()

    def _dispatch(self, payload: bytes) -> None:
        for task_id, events in decode_pod_message(payload):
            for reader in self._readers.get(task_id, ()):
                if reader.offer(events):
                    self._dirty.append(reader)
        if self._dirty and not self._flushing:
            # After the messages that are here already, so that each stream is written to once.
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        dirty, self._dirty = self._dirty, []
        for reader in dirty:
            if events := reader.flush():
                self.note_given(reader.task_id, events)

    def note_given(self, task_id: str, events: Sequence[Event]) -> None:
        """A reader is given these events of a log, which follow each other."""
        self.given += len(events)
        self.shown.note(task_id, events)

    def wake_all(self) -> None:
        """Have every reader look up, for the pod has news for it."""
        for readers in self._readers.values():
            for reader in readers:
                reader.wake()

    async def pulse(self) -> None:
        """Prove each subscription once a second, and say which tasks we no longer follow."""
        while True:
            await asyncio.sleep(PULSE_S)
            for task_id in self._unclaimed & self._expected.keys():
                self._close(self._expected.pop(task_id))
            self._unclaimed = set(self._expected)
            left, self._left = self._left, set()
            shards: dict[int, list[str]] = {}
            for task_id in left - self._readers.keys():
                shards.setdefault(shard_of(task_id) or 0, []).append(task_id)
            await asyncio.gather(
                *(self._unfollow(shard, group) for shard, group in shards.items()),
                *(channel.prove() for channel in self._channels),
            )

    async def _unfollow(self, shard: int, task_ids: list[str]) -> None:
        try:
            await self._scripts.unfollow(Keys(shard), pod=self.pod_id, task_ids=task_ids)
        except RedisError:
            self._left.update(task_id for task_id in task_ids if task_id not in self._readers)
        for task_id in task_ids:  # a reader that came meanwhile has to follow again
            for reader in self._readers.get(task_id, ()):
                reader.fall_behind()
