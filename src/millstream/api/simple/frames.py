"""The frames of a simple stream: `data: {"token": …, "finished": …}`, resumable by their ids."""

import re
from collections.abc import Sequence
from typing import Any

from millstream.api import sse
from millstream.api.errors import unfinished
from millstream.api.streams import RETRY_MS
from millstream.shared.errors import EventOutOfRange
from millstream.shared.events import TOKEN, Event
from millstream.shared.states import TaskState

# The task and the number: an EventSource that connects again repeats its first URL, which names no
# task, and has nothing to add but the last id.
_EVENT_ID = re.compile(r"([\w-]{1,64})/(\d{1,15})", re.ASCII)


def parse_event_id(given: str) -> tuple[str, int]:
    """The task and the number of the last event that a client has.

    Raises:
        EventOutOfRange: it is no id of a simple stream.
    """
    match = _EVENT_ID.fullmatch(given)
    if match is None:
        raise EventOutOfRange(
            "The last event id must be one of this stream: <task id>/<number>.",
            param="last_event_id",
        )
    return match[1], int(match[2])


class SimpleFrames:
    """The frames of one answer."""

    ping = sse.PING

    def __init__(self, task_id: str, *, after: int = 0, resumable: bool = False) -> None:
        self.resumable = resumable
        self._task_id = task_id
        self._after = after

    def opening(self) -> str:
        """The task's id, for those who cannot see headers: with it, whoever is cut can resume."""
        # A browser's own pause before it connects again is 3 s or more.
        pause = sse.retry_frame(RETRY_MS) if self.resumable else ""
        if self._after:
            return pause
        return pause + self._frame(0, {"task_id": self._task_id, "token": "", "finished": False})

    def frames(self, events: Sequence[Event]) -> str:
        """The frames of token events; one without text has none."""
        return "".join(
            f"id: {self._task_id}/{event.seq}\n"
            f'data: {{"token": {event.text_data}, "finished": false}}\n\n'
            for event in events
            if event.kind == TOKEN and event.text_data != '""'
        )

    def ending(self, event: Event) -> str:
        """The last frame; only an answer that was completed is called finished."""
        if event.kind != TaskState.COMPLETED:
            return self._frame(event.seq, unfinished(event))
        return self._frame(event.seq, {"token": "", "finished": True, **event.body})

    def trouble(self, error: dict[str, Any]) -> str:
        """An error of the stream: no id, for it is not part of the log."""
        return sse.data_frame(error)

    def farewell(self, error: dict[str, Any]) -> str:
        """Who comes back by itself, to another pod, need not hear of it."""
        return sse.retry_frame(RETRY_MS) if self.resumable else self.trouble(error)

    def _frame(self, seq: int, value: dict[str, Any]) -> str:
        return f"id: {self._task_id}/{seq}\n{sse.data_frame(value)}"
