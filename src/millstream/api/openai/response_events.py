"""The event stream of a response: which frames, under which numbers, a task's log stands for.

A frame and its `sequence_number` depend on the request and the log alone, never on when or where
they are asked for: so any pod resumes the stream at any of them, with the same bytes.

Numbers, in brackets those of a background response, which has one frame more:

- before any event of the log: `created` 0, `in_progress` [`queued`] 1;
- with event 1, unless it is `cancelled` or `failed`: [`in_progress` 2,] `output_item.added` 2 [3],
  `content_part.added` 3 [4];
- event k, a token: `output_text.delta` k + 3 [k + 4];
- event m, `completed`: `output_text.done` m + 3 [m + 4], then `content_part.done`,
  `output_item.done`, and `completed` or `incomplete`;
- event m, `cancelled` or `failed`: `failed` m + 3 [m + 4], but 2 if m is 1.
"""

from collections.abc import Sequence
from io import StringIO
from typing import Any

from millstream.api.openai.response_object import (
    output_id,
    output_message,
    response_object,
    text_part,
)
from millstream.api.sse import OPENAI_PING
from millstream.shared.events import Event, one_line
from millstream.shared.schemas import TaskRequest
from millstream.shared.states import TaskState
from millstream.shared.steps import LogPage

_OPENING = 2  # frames before the first event of the log
_FINISHING = 4  # frames of a completed task's last event


class Numbering:
    """From numbers of the log to numbers of the stream, and back."""

    def __init__(self, request: TaskRequest) -> None:
        self.background = request.response is not None and request.response.background
        self.ahead = _OPENING + 1 + self.background
        """By how much the stream's numbers are ahead of the log's."""

    def seen(self, number: int) -> int:
        """Up to which event of the log a client has seen that has seen this number."""
        return max(0, number - self.ahead)

    def last(self, page: LogPage) -> int:
        """The highest number there is, of a log that stands so."""
        if page.state == TaskState.COMPLETED:
            return page.seq + self.ahead + _FINISHING - 1
        if page.seq == 0:
            return _OPENING - 1
        return _OPENING if page.seq == 1 and page.state.terminal else page.seq + self.ahead


class ResponseFrames:
    """The frames of one stream; those up to number `after` are left out, but for their text.

    Fed with the whole log, from its first event: the last frames repeat all the text. `attached`
    says that the response ends with this stream, so that nobody goes on with it elsewhere.
    """

    ping = OPENAI_PING

    def __init__(
        self, task_id: str, request: TaskRequest, *, after: int = -1, attached: bool = False
    ) -> None:
        self._attached = attached
        self._task_id = task_id
        self._request = request
        self._after = after
        self._numbering = Numbering(request)
        self._item = output_id(task_id)
        self._where = {"item_id": self._item, "output_index": 0, "content_index": 0}
        self._text = StringIO()
        self._next = 0

    @property
    def resumable(self) -> bool:
        """A foreground response would be stopped with its connection."""
        return self._numbering.background

    def opening(self) -> str:
        """What is true before anything has happened."""
        background = self._numbering.background
        state = TaskState.QUEUED if background else TaskState.RUNNING
        kinds = ("created", "queued") if background else ("created", "in_progress")
        return "".join(self._lifecycle(kind, state) for kind in kinds)

    def frames(self, events: Sequence[Event]) -> str:
        """The frames of token events; also one without text has its own, for its number."""
        return "".join(map(self._delta, events))

    def ending(self, event: Event) -> str:
        """The frames of the last event: nothing is called finished that is not."""
        state, text = TaskState(event.kind), self._text.getvalue()
        if state != TaskState.COMPLETED:
            return self._lifecycle("failed", state, text=text, last=event)
        whole = response_object(self._task_id, self._request, state=state, text=text, last=event)
        (item,) = whole["output"]
        begun = self._begin() if event.seq == 1 else ""
        return (
            begun
            + self._frame("output_text.done", {**self._where, "text": text, "logprobs": []})
            + self._frame("content_part.done", {**self._where, "part": item["content"][0]})
            + self._frame("output_item.done", {"output_index": 0, "item": item})
            + self._frame(whole["status"], {"response": whole})
        )

    def trouble(self, error: dict[str, Any]) -> str:
        """An error that ends the stream, under the next number: there is none after it.

        The official client raises at `error`; others look for OpenAI's older, flat form.
        """
        value = {"type": "error", "sequence_number": max(self._after + 1, self._next)}
        value |= {name: error["error"][name] for name in ("code", "message", "param")} | error
        return f"event: error\ndata: {one_line(value)}\n\n"

    def farewell(self, error: dict[str, Any]) -> str | None:
        """The same, but where the response goes on, and another event will have that number."""
        return self.trouble(error) if self._attached else None

    def _begin(self) -> str:
        """The frames before the first text."""
        begun = ""
        if self._numbering.background:
            begun = self._lifecycle("in_progress", TaskState.RUNNING)
        item = output_message(self._item, "in_progress", [])
        return (
            begun
            + self._frame("output_item.added", {"output_index": 0, "item": item})
            + self._frame("content_part.added", {**self._where, "part": text_part("")})
        )

    def _delta(self, event: Event) -> str:
        begun = self._begin() if event.seq == 1 else ""
        self._text.write(event.text)
        number = self._number()
        if number <= self._after:
            return begun
        return (
            f"{begun}event: response.output_text.delta\n"
            f'data: {{"type":"response.output_text.delta","sequence_number":{number},'
            f'"item_id":"{self._item}","output_index":0,"content_index":0,'
            f'"delta":{event.text_data},"logprobs":[]}}\n\n'
        )

    def _lifecycle(self, kind: str, state: TaskState, **ended: Any) -> str:
        response = response_object(self._task_id, self._request, state=state, **ended)
        return self._frame(kind, {"response": response})

    def _frame(self, kind: str, fields: dict[str, Any]) -> str:
        number = self._number()
        if number <= self._after:
            return ""
        value = {"type": f"response.{kind}", "sequence_number": number, **fields}
        return f"event: response.{kind}\ndata: {one_line(value)}\n\n"

    def _number(self) -> int:
        self._next += 1
        return self._next - 1
