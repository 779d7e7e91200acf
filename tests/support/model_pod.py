"""A pod for a model of reading: real readers on a real subscription, heard when told to."""

from typing import Any

from millstream.api.feed import Reader
from millstream.shared.connection import open_subscriber
from millstream.shared.events import Event, decode_pod_message
from millstream.shared.keys import Keys
from millstream.shared.scripts import Scripts
from millstream.shared.steps import LogPage

_MARK = b"mark"


class ModelReader:
    """One open stream, and all that its client was sent."""

    def __init__(self, task_id: str, after: int, *, expected: bool = False) -> None:
        self.task_id = task_id
        self.after = after
        self.place = Reader(task_id)
        if expected:  # before the task is made
            self.place.begin_catch_up()
            self.place.end_catch_up(1)
        self.sent: list[Event] = []

    @property
    def next_seq(self) -> int:
        return self.after + len(self.sent) + 1

    def take(self) -> None:
        if not self.place.behind:
            self.sent += self.place.take()


class ModelPod:
    """What relay.py and feed.py do between two messages, step by step."""

    def __init__(self, redis_url: str, client: Any, scripts: Scripts, shard: Keys) -> None:
        self.id = "model-pod"
        self.readers: list[ModelReader] = []
        self._client = client
        self._scripts = scripts
        self._shard = shard
        self._channel = shard.pod(self.id)
        self._opened = open_subscriber(redis_url, self._channel)

    async def open(self) -> None:
        subscriber: Any = await self._opened.__aenter__()
        self._pubsub = subscriber.pubsub()
        await self._pubsub.ssubscribe(self._channel)
        await self._pubsub.parse_response(block=True)

    async def close(self) -> None:
        await self._pubsub.aclose()
        await self._opened.__aexit__(None, None, None)

    async def deliver(self, *, late: ModelReader | None = None) -> None:
        """Hear all that has been published, and give it to the readers.

        One whose page of the log is still on its way only gathers.
        """
        for payload in await self._heard():
            for task_id, events in decode_pod_message(payload):
                for reader in self.readers:
                    if reader.task_id == task_id:
                        reader.place.offer(events)
        for reader in self.readers:
            if reader is not late:
                reader.take()

    async def lose(self) -> None:
        """The subscription is cut and made anew: what was published meanwhile is never heard."""
        await self._heard()
        for reader in self.readers:
            reader.place.fall_behind()

    async def read_logs(self, *, hear_between: bool) -> None:
        """Readers that are behind read the log; messages may come while they do."""
        for reader in self.readers:
            if not reader.place.behind:
                continue
            reader.place.begin_catch_up()
            page = await self._scripts.follow(
                self._shard, task_id=reader.task_id, caller="c", pod=self.id,
                after=reader.next_seq - 1, count=2,
            )  # fmt: skip
            assert isinstance(page, LogPage)
            if hear_between:
                await self.deliver(late=reader)
            reader.sent += page.events
            reader.place.end_catch_up(reader.next_seq)
            if len(page.events) == 2 and not page.events[-1].terminal:
                reader.place.fall_behind()  # more to read
            reader.take()

    async def _heard(self) -> list[bytes]:
        await self._client.execute_command("SPUBLISH", self._channel, _MARK)
        payloads: list[bytes] = []
        while True:
            message = await self._pubsub.parse_response(block=True)
            if message[2] == _MARK:
                return payloads
            payloads.append(message[2])
