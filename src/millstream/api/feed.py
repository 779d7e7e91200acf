"""One subscription per pod and shard: what workers publish, handed to the readers of this pod.

The channel is a hint, the log is the truth: after any doubt (a reconnect, a gap in the numbers, a
full buffer) a reader is told that it is behind and reads the log again.
"""

import asyncio
import logging
import time
from collections.abc import Generator
from contextlib import contextmanager

from millstream.api.shown import Shown
from millstream.shared.connection import RedisError
from millstream.shared.events import Event, decode_pod_message
from millstream.shared.keys import Keys
from millstream.shared.schemas import shard_of
from millstream.shared.scripts import Scripts
from millstream.shared.subscription import Subscription

logger = logging.getLogger(__name__)

BUFFER_CHARS = 128 * 1024  # what a reader may be behind before it must read from the log
PULSE_S = 1.0
# A subscription that has not heard our own pulse for so long is dead, whatever TCP thinks.
PULSE_LOST_S = 4.0
PUT_BACK_PAUSE_S = 0.2
_PULSE = b"pulse"


class Reader:
    """One open stream's place in a task's log: a bounded buffer of events in order."""

    __slots__ = ("_buffer", "_size", "_tail", "_wake", "behind", "rewound", "task_id")

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        self.behind = True
        """The log must be read: the buffer misses something."""
        self.rewound = False
        """The log no longer holds what this pod has shown of it."""
        self._buffer: list[Event] = []
        self._size = 0
        self._tail: int | None = None
        self._wake = asyncio.Event()

    def offer(self, events: list[Event]) -> None:
        """Take new events from the feed; those already here are left out."""
        if self._tail is None:
            self._tail = events[0].seq
        for event in events:
            if event.seq > self._tail:
                self.fall_behind()
                return
            if event.seq == self._tail:
                self._buffer.append(event)
                self._tail += 1
                self._size += len(event.data)
        if self._size > BUFFER_CHARS:
            self.fall_behind()
        else:
            self._wake.set()

    def fall_behind(self) -> None:
        """Forget the buffer; the log has it all."""
        self._buffer.clear()
        self._size = 0
        self._tail = None
        self.behind = True
        self._wake.set()

    def begin_catch_up(self) -> None:
        """Gather events from now on, whatever their numbers; the log is about to be read."""
        self._buffer.clear()
        self._size = 0
        self._tail = None
        self.behind = False

    def end_catch_up(self, next_seq: int) -> None:
        """The log has been read up to `next_seq`; what came meanwhile must join on to it."""
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
        taken, self._buffer = self._buffer, []
        self._size = 0
        self._wake.clear()
        return taken

    def tell_rewound(self) -> None:
        """The log has gone on otherwise than was shown: nothing of it may follow."""
        self.rewound = True
        self.fall_behind()

    def wake(self) -> None:
        """End the wait without an event."""
        self._wake.set()

    async def wait(self, seconds: float) -> None:
        """Wait for events, for falling behind, for `wake`, or for so long."""
        if self._buffer or self.behind or self._wake.is_set():
            return
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass


class Feed:
    """The pod's subscription, and the readers it serves."""

    def __init__(
        self, redis_url: str, scripts: Scripts, shown: Shown, *, pod_id: str, shards: int
    ) -> None:
        self._subscription = Subscription(
            redis_url,
            [Keys(shard).pod(pod_id) for shard in range(shards)],
            on_open=self._on_open,
            on_message=self._on_message,
        )
        self._scripts = scripts
        self.shown = shown
        self._reopened = asyncio.Event()
        self._session = 0
        self._checked = 0
        self._shards = shards
        self.pod_id = pod_id
        self._readers: dict[str, set[Reader]] = {}
        self._left: set[str] = set()
        self._heard_at = time.monotonic()

    @property
    def session(self) -> int | None:
        """Which unbroken connection logs may be read in; None until they have been compared.

        After a loss of the connection Redis may hold another text than the one readers are in the
        middle of. So nothing is read to them until `put_back` has been through.
        """
        if self._subscription.open and self._checked == self._session:
            return self._session
        return None

    @property
    def streams(self) -> int:
        """How many readers are open."""
        return sum(len(readers) for readers in self._readers.values())

    @contextmanager
    def reading(self, task_id: str) -> Generator[Reader]:
        """A reader of a task, which begins behind: its owner reads the log first."""
        reader = Reader(task_id)
        self._readers.setdefault(task_id, set()).add(reader)
        self._left.discard(task_id)
        try:
            yield reader
        finally:
            readers = self._readers[task_id]
            readers.discard(reader)
            if not readers:
                del self._readers[task_id]
                self._left.add(task_id)

    async def run(self) -> None:
        """Listen for the pod's whole life."""
        await self._subscription.run()

    def _on_open(self) -> None:
        self._heard_at = time.monotonic()
        for readers in self._readers.values():
            for reader in readers:
                reader.fall_behind()
        self._session += 1
        self._reopened.set()

    async def put_back(self) -> None:
        """After each loss of the connection see that the logs hold what was shown of them."""
        while True:
            await self._reopened.wait()
            self._reopened.clear()
            session = self._session
            try:
                changed = await self.shown.put_back()
            except RedisError as error:
                logger.debug("put back: %s", error)
                self._reopened.set()
                await asyncio.sleep(PUT_BACK_PAUSE_S)
                continue
            for task_id in changed:
                for reader in self._readers.get(task_id, ()):
                    reader.tell_rewound()
            self._checked = session

    def _on_message(self, payload: bytes) -> None:
        self._heard_at = time.monotonic()
        if payload != _PULSE:
            self._dispatch(payload)
            return
        for shard in range(self._shards):
            self.shown.forget_old(shard)

    def _dispatch(self, payload: bytes) -> None:
        for task_id, events in decode_pod_message(payload):
            for reader in self._readers.get(task_id, ()):
                reader.offer(events)

    def wake_all(self) -> None:
        """Have every reader look up, for the pod has news for it."""
        for readers in self._readers.values():
            for reader in readers:
                reader.wake()

    async def pulse(self) -> None:
        """Prove the subscription once a second, and tell Redis which tasks we no longer follow."""
        while True:
            await asyncio.sleep(PULSE_S)
            left, self._left = self._left, set()
            try:
                await self._unfollow([task_id for task_id in left if task_id not in self._readers])
                for shard in range(self._shards):
                    await self._scripts.publish(Keys(shard).pod(self.pod_id), _PULSE)
            except RedisError:
                self._left |= left
                continue  # Redis is away; the subscription will notice as well
            if time.monotonic() - self._heard_at > PULSE_LOST_S:
                logger.warning("the subscription is deaf; connecting again")
                self._heard_at = time.monotonic()
                await self._subscription.drop()

    async def _unfollow(self, task_ids: list[str]) -> None:
        shards: dict[int, list[str]] = {}
        for task_id in task_ids:
            shards.setdefault(shard_of(task_id) or 0, []).append(task_id)
        for shard, group in shards.items():
            await self._scripts.unfollow(Keys(shard), pod=self.pod_id, task_ids=group)
        for task_id in task_ids:  # a reader that came meanwhile has to follow again
            for reader in self._readers.get(task_id, ()):
                reader.fall_behind()
