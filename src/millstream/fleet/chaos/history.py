"""What clients saw and did, written down as it happened; judged when all is over."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from millstream.fleet.chaos.prompts import Prompt


class Form(StrEnum):
    """How a client asks."""

    NATIVE = "native stream"
    POLL = "native, polled"
    CHAT_STREAM = "chat stream"
    CHAT_WHOLE = "chat, whole"
    RESPONSE = "background response"

    @property
    def lasting(self) -> bool:
        """Whether the task outlives the connection that made it."""
        return self in (Form.NATIVE, Form.POLL, Form.RESPONSE)

    @property
    def numbered(self) -> bool:
        """Whether it is read by the numbers of its log, over many connections."""
        return self in (Form.NATIVE, Form.RESPONSE)

    @property
    def streamed(self) -> bool:
        """Whether its tokens come one by one."""
        return self.numbered or self == Form.CHAT_STREAM


@dataclass(frozen=True, slots=True)
class Seen:
    """One event as a client got it; chats have no numbers."""

    seq: int | None
    kind: str
    data: str
    """The text of a token, the JSON of an end; empty where a client is not told all of it."""
    at: float


@dataclass(slots=True, eq=False)
class Connection:
    """One connection's part of an answer: all after event number `after`."""

    after: int = 0
    task_id: str | None = None
    seen: list[Seen] = field(default_factory=list[Seen])
    finish_reason: str | None = None
    usage: dict[str, int] | None = None
    done: bool = False
    """Whether it said that the answer is whole: a terminal event, or `[DONE]`."""
    error: str | None = None
    """The code of an error that ended it."""

    @property
    def text(self) -> str:
        """All text that came over it."""
        return "".join(seen.data for seen in self.seen if seen.kind == "token")

    @property
    def last_seq(self) -> int:
        """The number to resume from."""
        return self.seen[-1].seq or 0 if self.seen else self.after


@dataclass(frozen=True, slots=True)
class Look:
    """An answer of `GET /tasks/{id}`."""

    status: str
    text: str
    usage: dict[str, int]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Stopped:
    """An answer to a stop."""

    task_id: str
    status: str
    usage: dict[str, int]


@dataclass(slots=True, eq=False)
class History:
    """One client's dealings with one task."""

    form: Form
    prompt: Prompt
    key: str | None = None
    posts: int = 0
    """How often it was sent, answered or not."""
    task_ids: list[str] = field(default_factory=list[str])
    """What the answers said; the same one again for each replay."""
    connections: list[Connection] = field(default_factory=list[Connection])
    looks: list[Look] = field(default_factory=list[Look])
    stops: list[Stopped] = field(default_factory=list[Stopped])
    stop_sent: bool = False
    """Whether a stop was on its way, answered or not."""
    left: bool = False
    """Whether a connection that the task belonged to broke."""
    ended: bool = False
    """Whether the client has all it wanted."""
    troubles: list[str] = field(default_factory=list[str])
    """Answers that no fault excuses."""
    retried: Counter[str] = field(default_factory=Counter[str])
    scope: asyncio.Timeout | None = None
    """Of what the client waits for; to cut it off."""

    @property
    def task_id(self) -> str | None:
        """The task, once an answer has named it."""
        return self.task_ids[-1] if self.task_ids else None

    @property
    def attached(self) -> bool:
        """Whether the task ends with its connection."""
        return not self.form.lasting and self.key is None

    @property
    def last_seq(self) -> int:
        """The number of the last event seen."""
        return self.connections[-1].last_seq if self.connections else 0

    def connect(self) -> Connection:
        """Begin another connection, after what was seen."""
        numbered = self.form.numbered
        connection = Connection(
            self.last_seq if numbered else 0, task_id=self.task_id if numbered else None
        )
        self.connections.append(connection)
        return connection

    def cut(self) -> bool:
        """Cut the client off from what it waits for; False if it waits for nothing."""
        if self.scope is None or self.scope.expired():
            return False
        self.scope.reschedule(0)
        return True

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for whoever has to find out what went wrong."""
        return {
            "form": self.form,
            "prompt": self.prompt.text,
            "sampling": self.prompt.sampling,
            "key": self.key,
            "task_ids": self.task_ids,
            "stop_sent": self.stop_sent,
            "stops": [[stop.task_id, stop.status, stop.usage] for stop in self.stops],
            "left": self.left,
            "ended": self.ended,
            "troubles": self.troubles,
            "retried": dict(self.retried),
            "looks": [[look.status, look.text, look.usage] for look in self.looks[-2:]],
            "connections": [
                {
                    "after": connection.after,
                    "task_id": connection.task_id,
                    "seen": [
                        [seen.seq, seen.kind, seen.data, round(seen.at, 3)]
                        for seen in connection.seen
                    ],
                    "finish_reason": connection.finish_reason,
                    "usage": connection.usage,
                    "done": connection.done,
                    "error": connection.error,
                }
                for connection in self.connections
            ],
        }
