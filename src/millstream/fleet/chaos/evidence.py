"""All that the verdict rests on: what clients saw, what lies in Redis, how the fleet was."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple

import redis.asyncio

from millstream.fleet.chaos.history import History
from millstream.fleet.chaos.reference import Reference, undisturbed
from millstream.fleet.chaos.schedule import Fault
from millstream.shared.events import Event
from millstream.shared.keys import Keys
from millstream.shared.schemas import TaskRequest, decode_request
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings
from millstream.shared.states import TaskState
from millstream.shared.usage import DayOfUsage, read_usage


class Entry(NamedTuple):
    """An event of a log, and the attempt that wrote it."""

    attempt: int
    event: Event


@dataclass(eq=False)
class TaskRecord:
    """A task as Redis has it."""

    id: str
    request: TaskRequest
    fields: dict[str, str]
    log: list[Entry]
    max_tokens: int = Settings.model_fields["max_tokens_limit"].default

    @property
    def state(self) -> str:
        """The state in the task's hash."""
        return self.fields.get("state", "")

    @property
    def last(self) -> Event | None:
        """The terminal event, if it has one."""
        event = self.log[-1].event if self.log else None
        return event if event is not None and event.terminal else None

    @property
    def tokens(self) -> int:
        """Tokens in the log."""
        return sum(event.token_count for _, event in self.log)

    @property
    def text(self) -> str:
        """The text in the log."""
        return "".join(event.text for _, event in self.log if event.kind == "t")

    @property
    def prompt(self) -> str:
        """All that the caller said."""
        return self.request.prompt or "".join(item.content for item in self.request.messages)

    @cached_property
    def reference(self) -> Reference:
        """What an undisturbed run gives."""
        return undisturbed(self.request, max_tokens=self.max_tokens)


@dataclass
class Evidence:
    """Everything that was written down."""

    histories: list[History]
    tasks: dict[str, TaskRecord]
    dead: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Dead letters: by task, how often it was lost."""
    max_attempts: int = 3
    unrest: list[str] = field(default_factory=list[str])
    """What was not quiet when it had to be."""
    healed_after_s: float | None = 0.0
    """When first tokens came as fast as before; None if they did not."""
    unready: list[str] = field(default_factory=list[str])
    """Pods that did not say they are ready at the end."""
    log_rates: dict[str, float] = field(default_factory=dict[str, float])
    """By process, its log lines a second where they were most."""
    ends: Counter[int] = field(default_factory=Counter[int])
    """Exit codes of the workers."""
    struck: Counter[Fault] = field(default_factory=Counter[Fault])
    used: Sequence[DayOfUsage] | None = None
    """What was counted for callers; None if nobody looked."""

    @cached_property
    def by_canary(self) -> dict[str, History]:
        """Whose prompt it is."""
        return {history.prompt.canary: history for history in self.histories}

    def asked_by(self, task: TaskRecord) -> History | None:
        """The history that a task belongs to, also where no answer named it."""
        canary = task.prompt.rstrip(".").rpartition(" ")[2]
        return self.by_canary.get(canary)


async def read_tasks(
    client: redis.asyncio.Redis, shards: Sequence[Keys], *, max_tokens: int
) -> dict[str, TaskRecord]:
    """All tasks there are, with their logs."""
    untyped: Any = client
    tasks: dict[str, TaskRecord] = {}
    for shard in shards:
        prefix = shard.task("")
        async for key in untyped.scan_iter(f"{prefix}*", count=1000):
            task_id = key.decode().removeprefix(prefix)
            raw: dict[bytes, bytes] = await untyped.hgetall(key)
            fields = {
                name.decode(): value.decode() for name, value in raw.items() if name != b"request"
            }
            entries: list[Any] = await untyped.xrange(shard.log(task_id))
            tasks[task_id] = TaskRecord(
                task_id,
                decode_request(raw.get(b"request", b'{"model":""}')),
                fields,
                [_entry(*entry) for entry in entries],
                max_tokens,
            )
    return tasks


def _entry(entry_id: bytes, named: dict[bytes, bytes]) -> Entry:
    seq = int(entry_id.partition(b"-")[0])
    event = Event(seq, named[b"k"].decode(), named[b"i"].decode(), named[b"d"].decode())
    return Entry(int(named[b"a"]), event)


async def read_dead(
    client: redis.asyncio.Redis, shards: Sequence[Keys], model: str
) -> dict[str, list[int]]:
    """The dead letters."""
    untyped: Any = client
    dead: dict[str, list[int]] = {}
    for shard in shards:
        for _, named in await untyped.xrange(shard.dead(model)):
            dead.setdefault(named[b"task"].decode(), []).append(int(named[b"lost"]))
    return dead


async def read_used(scripts: Scripts, *, shards: int) -> Sequence[DayOfUsage]:
    """What was counted for all callers, yesterday's too if midnight has just been."""
    today = datetime.now(UTC).date()
    return await read_usage(
        scripts.runner, shards=shards, first=today - timedelta(days=1), last=today, caller=None
    )


TERMINAL = {state.value for state in TaskState if state.terminal}
"""The states that are never left."""
