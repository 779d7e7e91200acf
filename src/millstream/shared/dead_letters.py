"""The dead letters: tasks that took MAX_ATTEMPTS workers down, kept for somebody to look at."""

import re
from typing import Any

import msgspec
import redis.asyncio

from millstream.shared.errors import QueueFull
from millstream.shared.keys import Keys
from millstream.shared.schemas import new_task_id
from millstream.shared.scripts import Scripts

_KEY = re.compile(r"\{ms:(\d+)\}:dead:(.*)", re.DOTALL)
_PATTERN = "{ms:*}:dead:*"


class DeadLetter(msgspec.Struct, frozen=True):
    """One task that was given up."""

    shard: int
    model: str
    entry: str
    """Its id in the stream of dead letters."""
    task_id: str
    caller: str
    attempts: int
    error: str
    request: bytes

    @property
    def failed_at(self) -> float:
        """Unix time."""
        return int(self.entry.partition("-")[0]) / 1000


class DeadLetters:
    """The dead letters of all models and shards, the oldest first."""

    def __init__(self, client: redis.asyncio.Redis, scripts: Scripts) -> None:
        self._client: Any = client  # redis-py does not type what it answers
        self._scripts = scripts

    async def read(self, model: str | None = None) -> list[DeadLetter]:
        """All of them, or those of a model."""
        letters: list[DeadLetter] = []
        async for raw in self._client.scan_iter(match=_PATTERN, count=1000):
            match = _KEY.fullmatch(raw.decode())
            if match is None or (model is not None and match[2] != model):
                continue
            for entry, fields in await self._client.xrange(raw):
                letters.append(_letter(int(match[1]), match[2], entry.decode(), fields))
        return sorted(letters, key=lambda letter: (letter.failed_at, letter.entry))

    async def retry(
        self, letter: DeadLetter, *, max_queue: int, live_ttl_s: int, life_s: float = 3600
    ) -> str | None:
        """Submit its request again; the id of the new task, None where the letter is gone.

        Raises:
            QueueFull: as many tasks wait as may; the letter stays.
        """
        task_id = new_task_id(letter.shard)
        answer = await self._scripts.retry(
            Keys(letter.shard),
            model=letter.model,
            entry=letter.entry,
            task_id=task_id,
            max_queue=max_queue,
            live_ttl_s=live_ttl_s,
            life_s=life_s,
        )
        if answer == "full":
            raise QueueFull(f"The queue of {letter.model} is full; try again when it is shorter.")
        return task_id if answer == "queued" else None

    async def drop(self, letter: DeadLetter) -> bool:
        """Forget it; whether it was still there."""
        key = Keys(letter.shard).dead(letter.model)
        return await self._client.xdel(key, letter.entry) == 1


def _letter(shard: int, model: str, entry: str, fields: dict[bytes, bytes]) -> DeadLetter:
    return DeadLetter(
        shard=shard,
        model=model,
        entry=entry,
        task_id=fields[b"task"].decode(),
        caller=fields[b"caller"].decode(),
        attempts=int(fields[b"attempts"]),
        error=fields[b"error"].decode(),
        request=fields[b"request"],
    )
