"""What the atomic steps of a task are given and answer: the values that `Scripts` trades in."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from millstream.shared.events import TOKEN, Event, decode_log, gapless
from millstream.shared.fair_order import Waiting, serving_order
from millstream.shared.states import Priority, TaskState

STALE, ENDED, MISSING = -1, -2, -3
"""What append answers instead of an event number."""


class StopAnswer(NamedTuple):
    """How a task stands that was to be stopped."""

    state: str
    """Also `unknown`, `expired`, or that of `SHORT`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    now: bool = False
    """Whether this call has ended it."""


SHORT = StopAnswer("short")
"""What stop answers while the log lacks what it had when the task was stopped before."""


class Submitted(msgspec.Struct, frozen=True):
    """Tasks that were accepted, or that this idempotency key had made before."""

    task_ids: tuple[str, ...]
    known: bool
    created_ms: int
    """Unix time, by Redis's clock."""
    position: int
    """At which place the first of them will be served, 1 the next; 0: it waits no more."""
    eta_s: float | None
    """None: nothing runs or was measured."""

    @property
    def task_id(self) -> str:
        """The first of them."""
        return self.task_ids[0]


class Refused(msgspec.Struct, frozen=True):
    """Tasks that were not accepted: the queue is full, or the key stands for another request."""

    conflict: bool
    retry_after_s: float
    crowded: bool = False
    """The queue may have room, but as many of this caller's tasks wait as may."""


def submit_answer(answer: Sequence[Any]) -> Submitted | Refused:
    """What submit.lua answers."""

    def ids() -> tuple[str, ...]:
        return tuple(answer[1].decode().split(" "))

    match answer[0]:
        case b"queued":
            eta_s = None if answer[4] < 0 else answer[4] / 1000
            return Submitted(ids(), False, answer[2], answer[3], eta_s)
        case b"known":
            return Submitted(ids(), True, answer[2], 0, 0.0)
        case b"full":
            return Refused(conflict=False, retry_after_s=answer[1] / 1000)
        case b"crowded":
            return Refused(conflict=False, retry_after_s=answer[1] / 1000, crowded=True)
        case _:
            return Refused(conflict=True, retry_after_s=0)


@dataclass(frozen=True, slots=True)
class Claim:
    """A task given to this worker, with its log so far."""

    task_id: str
    attempt: int
    request: bytes
    """Empty where it is gone from the task."""
    log: list[Event]
    suspect: bool = False
    """One more loss without progress would end it; a worker runs one such task at a time."""
    age_s: float = field(default=0.0, compare=False)
    """How long ago it was submitted."""
    priority: Priority = Priority.INTERACTIVE
    handed_over: bool = False
    """Its last worker let it go, in a drain."""
    predecessor: str = ""
    """The worker that was lost with it; '' if none was."""
    torn: bool = False
    """Events of its log are missing: `log` has as many as there were, and none of their text."""

    @classmethod
    def of(cls, row: Sequence[Any]) -> "Claim":
        """What claim.lua answers for a task."""
        log, seq = decode_log(row[3]), row[9]
        if torn := not gapless(log, after=0, upto=seq):
            log = [Event(number, TOKEN, "", '""') for number in range(1, seq + 1)]
        return cls(
            row[0].decode(),
            row[1],
            row[2] or b"",
            log,
            suspect=row[4] == 1,
            age_s=row[5] / 1000,
            priority=Priority(row[6].decode()),
            handed_over=row[7] == 1,
            predecessor=row[8].decode(),
            torn=torn,
        )

    @classmethod
    def sent(cls, message: bytes) -> "Claim":
        """What is sent to the worker for which a new task was started."""
        task_id, request, priority = msgspec.msgpack.decode(message, type=tuple[str, str, str])
        return cls(task_id, 1, request.encode(), [], priority=Priority(priority))


class LogPage(msgspec.Struct, frozen=True):
    """A piece of a task's log, and how the task stood at that moment."""

    state: TaskState
    seq: int
    """The number of the last event in the whole log."""
    model: str
    events: list[Event]


_PRIORITIES = {str(priority): priority for priority in Priority}


class QueueView(msgspec.Struct, frozen=True):
    """How a model's queue stands on one shard."""

    running: int
    waiting: int
    oldest_wait_s: float
    place_s: float | None
    """Seconds between two places that become free; 0: a worker has room; None: unknown."""
    cost: int
    """Tokens that a task of the model costs, smoothed."""
    line: list[Waiting]
    counters: dict[str, dict[str, float]]
    """Per level of the fair queue, the tokens that each who waits was served."""

    @classmethod
    def of(cls, answer: Sequence[Any]) -> "QueueView":
        """What waiting.lua answers."""
        running, waiting, oldest, place, cost, line, turns = answer
        members = [member.decode().split(":") for member in line]
        return cls(
            running,
            waiting,
            oldest / 1000,
            None if place < 0 else place / 1000,
            cost,
            [Waiting(task_id, _PRIORITIES[level], who) for level, who, _, task_id in members],
            {
                level.decode(): {who.decode(): float(used) for who, used in _pairs(flat)}
                for level, flat in _pairs(turns)
            },
        )

    @property
    def waiting_ids(self) -> list[str]:
        """In the order in which they would be served, if nobody came and all cost the same."""
        return serving_order(self.line, self.counters, cost=self.cost)


class AppendRow(msgspec.Struct, frozen=True):
    """What one decode step (or several) brought for one task."""

    task_id: str
    attempt: int
    prompt_tokens: int
    first_seq: int
    events: Sequence[tuple[str, str]]
    """(ids, data) of token events, numbered from `first_seq`."""
    outcome: str = ""
    """'' goes on; a terminal state ends the task after the events."""
    detail: str = ""
    """The finish reason of a completed task, the error JSON of a failed one."""

    def flatten(self) -> list[Any]:
        """The row as append.lua reads it."""
        row = [
            self.task_id,
            self.attempt,
            self.prompt_tokens,
            self.first_seq,
            self.outcome,
            self.detail,
        ]
        for event in self.events:
            row += event
        return row


def _pairs(flat: list[Any]) -> Iterable[tuple[Any, Any]]:
    """What a script answers for a mapping, as pairs."""
    return zip(flat[::2], flat[1::2], strict=True)
