"""What holds after each step of the protocol's model, whatever the steps were."""

import asyncio
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, invariant
from redis.exceptions import ResponseError
from tests.support.model_task import Held, Losses, Task

from millstream.shared.events import Event
from millstream.shared.keys import CLASSES, Keys
from millstream.shared.scripts import Scripts
from millstream.shared.states import Priority
from millstream.shared.steps import LogPage, QueueView

SHARD = Keys(0)
LENGTH = 5
WORKERS = ("w0", "w1", "w2")


class Watched(RuleBasedStateMachine):
    """What there is of tasks, as everybody knows it, and what must be true of it."""

    loop: asyncio.AbstractEventLoop
    client: Any

    def __init__(self) -> None:
        super().__init__()
        self.run(self.client.flushdb())
        self.scripts = Scripts(self.client)
        self.listening = self.client.pubsub()
        self.tasks: dict[str, Task] = {}
        self.poison: set[str] = set()
        self.deleted: dict[str, str] = {}
        """Ids and whose they were."""
        self.submitted = 0
        self.claims = 0
        self.memory: dict[bytes, bytes] = {}
        self.counts: dict[str, tuple[int, Losses]] = {}
        """Both as Redis's file has them: all keys, and attempt and losses of each task."""
        self.held: dict[str, dict[str, Held]] = {worker: {} for worker in WORKERS}

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def view(self) -> QueueView:
        return self.run(self.scripts.waiting(SHARD, model="m", count=1000))

    def letters(self) -> int:
        """How many tasks were given up."""
        return self.run(self.client.xlen(SHARD.dead("m")))

    def state(self, task_id: str) -> str:
        return self.run(self.scripts.task_fields(SHARD, task_id))["state"]

    def owner_of(self, task_id: str) -> str:
        return self.run(self.scripts.task_fields(SHARD, task_id)).get("worker", "")

    async def listen(self) -> None:
        """Have all workers listen for tasks."""
        await self.listening.ssubscribe(*map(SHARD.run, WORKERS))
        for _ in WORKERS:
            await self.listening.get_message(timeout=5)

    async def entries_of(self, worker: str) -> list[Any]:
        """What is a worker's in the queue."""
        try:
            return await self.client.xpending_range(
                SHARD.queue("m"), "workers", "-", "+", 1000, worker
            )
        except ResponseError:  # no group
            return []

    @invariant()
    def logs_only_grow(self) -> None:
        for task_id, task in self.tasks.items():
            page = self.run(
                self.scripts.follow(
                    SHARD, task_id=task_id, caller=task.caller, pod="", after=0, count=100
                )
            )
            assert isinstance(page, LogPage)
            events = page.events
            assert [event.seq for event in events] == list(range(1, len(events) + 1))  # I1
            assert events[: len(task.seen)] == task.seen  # I2
            terminal = [event for event in events if event.terminal]
            assert terminal == events[len(events) - len(terminal) :]  # I3: last,
            assert len(terminal) <= 1  # and once
            for event in events:
                assert event.terminal or event.ids == str(event.seq)
            task.seen = events
            if terminal:
                assert task.terminal in (None, terminal[0].kind)
                if task.terminal is None and terminal[0].kind == "failed":
                    self.note_failure(task_id, task, terminal[0])
                task.terminal = terminal[0].kind
                if task.terminal == "completed":
                    assert len(events) == LENGTH + 1
                    usage = terminal[0].body["usage"]
                    assert usage["completion_tokens"] == LENGTH  # I8
            assert page.state.terminal == bool(terminal)

    def note_failure(self, task_id: str, task: Task, end: Event) -> None:
        """Nothing ends a task here but its losses, and it is kept once (I14)."""
        assert end.body["error"]["code"] == "max_attempts"
        task.losses.give_up(end.seq - 1)
        letters = self.run(self.client.xrange(SHARD.dead("m")))
        assert [fields[b"task"].decode() for _, fields in letters].count(task_id) == 1

    @invariant()
    def nothing_is_lost(self) -> None:
        """Submitted == ended + in the queue (I5)."""
        unfinished = sum(task.terminal is None for task in self.tasks.values())
        assert self.run(self.client.xlen(SHARD.queue("m"))) == unfinished

    @invariant()
    def the_line_is_who_waits(self) -> None:
        """Each task that waits stands there once, and its caller and class have their turn."""
        view = self.view()
        assert sorted(view.waiting_ids) == sorted(
            t for t in self.tasks if self.state(t) == "queued"
        )
        assert view.waiting == len(view.line)
        for level in Priority:
            there = {task.who for task in view.line if task.priority == level}
            assert set(view.counters[level]) == there
        assert set(view.counters[CLASSES]) == {task.priority for task in view.line}
        due = {member.decode() for member in self.run(self.client.zrange(SHARD.due(), 0, -1))}
        assert due >= {t for t, task in self.tasks.items() if not task.terminal and task.attempt}
