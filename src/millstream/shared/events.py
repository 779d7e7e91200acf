"""The events of a task's log: how a worker writes them and how everyone reads them.

An entry of the log is `XADD log:<id> <seq>-0 k <kind> a <attempt> i <ids> d <data>`:

| kind | ids | data |
| --- | --- | --- |
| `t` token | token ids, with commas between | the text as a JSON string; see below |
| `completed` | none | `{"finish_reason": …, "usage": {…}}` |
| `cancelled` | none | `{"usage": {…}}` |
| `failed` | none | `{"error": {"message", "type", "param", "code"}}` |

Where the request asks for log probabilities, or for what depends on them, a token's data is
`{"text": …, "logprobs": […]}` with an object in OpenAI's form for each id: what was told once is
what every reader is told, and the next owner knows how sure the model was.

The data is JSON already, so a pod passes it on without decoding it. A token event carries one token
almost always; none when held-back text comes free at the end.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from millstream.shared.states import TaskState

TOKEN = "t"  # noqa: S105 - a kind of event, no secret
TERMINAL_KINDS = frozenset({TaskState.COMPLETED, TaskState.CANCELLED, TaskState.FAILED})


class Event(msgspec.Struct, frozen=True, gc=False):
    """One entry of a task's log.

    A pod makes a hundred thousand a second and keeps those of some seconds. The garbage collector
    looks at none of them (`gc=False`): text and numbers cannot refer back.
    """

    seq: int
    kind: str
    ids: str
    data: str

    @property
    def terminal(self) -> bool:
        """Whether this is the last event of its task."""
        return self.kind in TERMINAL_KINDS

    @property
    def token_ids(self) -> list[int]:
        """The token ids it carries."""
        return [int(part) for part in self.ids.split(",")] if self.ids else []

    @property
    def token_count(self) -> int:
        """How many tokens it carries."""
        return self.ids.count(",") + 1 if self.ids else 0

    @property
    def text(self) -> str:
        """The text of a token event."""
        if self.data.startswith("{"):
            return _detailed_decoder.decode(self.data).text
        return _text_decoder.decode(self.data)

    @property
    def text_data(self) -> str:
        """The text of a token event, as JSON."""
        if self.data.startswith("{"):
            return token_data(self.text)
        return self.data

    @property
    def logprobs_data(self) -> str:
        """The log probabilities of a token event, as a JSON array; empty where none are kept."""
        if self.data.startswith("{"):
            return bytes(_detailed_decoder.decode(self.data).logprobs).decode()
        return "[]"

    @property
    def logprobs(self) -> "list[TokenLogprob]":
        """The log probabilities of a token event, one a token id, where they are kept."""
        return _logprobs_decoder.decode(self.logprobs_data)

    @property
    def body(self) -> dict[str, Any]:
        """The data of a terminal event."""
        return _body_decoder.decode(self.data)


class Alternative(msgspec.Struct, frozen=True):
    """A token that might come at a place, in OpenAI's form."""

    token: str
    """Its text; `bytes:\\x..` where it is no whole characters."""
    logprob: float
    """Natural logarithm of its probability by the model, before temperature and all else."""
    bytes: list[int]


class TokenLogprob(Alternative, frozen=True):
    """The token that came."""

    top_logprobs: list[Alternative]
    """The likeliest ones at this place, best first."""


class _Detailed(msgspec.Struct):
    """The data of a token event with log probabilities."""

    text: str
    logprobs: msgspec.Raw


_FIELDS = frozenset({b"k", b"i", b"d"})
_UNICODE_BREAKS = (("\u2028", "\\u2028"), ("\u2029", "\\u2029"), ("\x85", "\\u0085"))
_text_decoder = msgspec.json.Decoder(str)
_detailed_decoder = msgspec.json.Decoder(_Detailed)
_logprobs_decoder = msgspec.json.Decoder(list[TokenLogprob])
_body_decoder = msgspec.json.Decoder(dict[str, Any])
_pod_decoder = msgspec.msgpack.Decoder(list[list[Any]])
_encode = msgspec.json.Encoder().encode


def token_data(text: str, logprobs: str | None = None) -> str:
    """The data of a token event.

    Args:
        text: What became certain of the text.
        logprobs: A JSON array, from `one_line`, where log probabilities are kept.
    """
    data = one_line(text)
    return data if logprobs is None else f'{{"text":{data},"logprobs":{logprobs}}}'


def one_line(value: Any) -> str:
    """JSON in which no client finds a line break."""
    data = _encode(value).decode()
    if not data.isascii():
        # Line breaks to Unicode, though not to SSE: some clients split lines at them.
        for character, escape in _UNICODE_BREAKS:
            data = data.replace(character, escape)
    return data


def error_data(message: str, *, code: str, param: str | None = None, kind: str) -> str:
    """The data of a failed event; `kind` is OpenAI's error type."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return _encode({"error": error}).decode()


def decode_log(entries: Sequence[Sequence[Any]]) -> list[Event]:
    """Read entries as XRANGE or a script returns them: `[id, [field, value, …]]`, all bytes.

    What somebody else has put between them is passed over.
    """
    events: list[Event] = []
    for entry_id, fields in entries:
        seq = int(entry_id[: entry_id.index(b"-")])
        named = dict(zip(fields[::2], fields[1::2], strict=True))
        if named.keys() >= _FIELDS:
            kind, ids, data = (named[name].decode() for name in (b"k", b"i", b"d"))
            events.append(Event(seq, kind, ids, data))
    return events


def gapless(events: Sequence[Event], *, after: int, upto: int) -> bool:
    """Whether these are all events after a number, up to another one, in order."""
    numbers = range(after + 1, upto + 1)
    return len(events) == len(numbers) and all(
        event.seq == number for event, number in zip(events, numbers, strict=True)
    )


def decode_pod_message(payload: bytes) -> list[tuple[str, list[Event]]]:
    """Read what a pod's channel carries: per task its id and its new events.

    The message is msgpack `[[task_id, first_seq, kind, ids, data, kind, ids, data, …], …]`.
    """
    tasks: list[tuple[str, list[Event]]] = []
    for row in _pod_decoder.decode(payload):
        task_id, seq = row[0], row[1]
        if len(row) == 5:  # a token, as a step brings it
            events = [Event(seq, row[2], row[3], row[4])]
        else:
            events = [
                Event(seq + n, row[at], row[at + 1], row[at + 2])
                for n, at in enumerate(range(2, len(row), 3))
            ]
        tasks.append((task_id, events))
    return tasks
