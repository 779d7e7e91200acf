"""A strict parser of Server-Sent Events (WHATWG HTML, 9.2.6), to judge what the server sends."""

import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Frame:
    """One dispatched event, and the comments that came before it."""

    id: str | None
    event: str
    data: str
    comments: list[str] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.data)


class Parser:
    """Fed with lines; gives a frame at each blank line that ends one."""

    def __init__(self) -> None:
        self._id: str | None = None
        self._event = ""
        self._data: list[str] = []
        self.comments: list[str] = []
        self.retry: int | None = None

    def feed(self, line: str) -> Frame | None:
        if line == "":
            if not self._data:
                assert not self._event, "an event without data is never dispatched"
                return None
            frame = Frame(self._id, self._event or "message", "\n".join(self._data), self.comments)
            self._id, self._event, self._data, self.comments = None, "", [], []
            return frame
        if line.startswith(":"):
            self.comments.append(line[1:].strip())
            return None
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "id":
                self._id = value
            case "event":
                self._event = value
            case "data":
                self._data.append(value)
            case "retry":
                self.retry = int(value)
            case _:
                raise AssertionError(f"unknown field in {line!r}")
        return None


def parse(text: str) -> list[Frame]:
    """All frames of a whole body; it must end with a complete one."""
    assert text.endswith("\n")
    parser = Parser()
    return [frame for line in text.split("\n") if (frame := parser.feed(line))]


async def frames(lines: AsyncIterator[str]) -> AsyncIterator[Frame]:
    """Frames of an open response (`response.aiter_lines()`)."""
    parser = Parser()
    async for line in lines:
        if frame := parser.feed(line):
            yield frame


def native_text(frames: Iterable[Frame]) -> str:
    """The text of a native stream."""
    return "".join(frame.json["text"] for frame in frames if frame.event == "token")


def check_native(frames: list[Frame], *, first: int = 1) -> None:
    """Numbers without gap, duplicate or reorder; one terminal event, last (I1, I3)."""
    numbered = [frame for frame in frames if frame.event != "queued"]
    assert [int(frame.id or -1) for frame in numbered] == list(range(first, first + len(numbered)))
    kinds = [frame.event for frame in numbered]
    assert set(kinds[:-1]) <= {"token"}
    assert kinds[-1] in ("completed", "cancelled", "failed")


def chat_text(frames: list[Frame]) -> str:
    """The text of an OpenAI stream that ended well; checks its shape on the way."""
    assert frames[-1].data == "[DONE]"
    chunks = [frame.json for frame in frames[:-1]]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert [reason for reason in reasons if reason] == reasons[-1:]
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
