"""Reads Server-Sent Events strictly, as WHATWG HTML has them: what is not well formed is an error.

Not by lines of the HTTP client, which also breaks them at U+2028 and the like.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass

_FIELDS = ("id", "event", "data", "retry")


class MalformedStream(Exception):
    """The server sent what is no event stream."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One block of a stream; a keepalive has no fields."""

    id: str | None = None
    event: str = "message"
    data: str | None = None


async def read_frames(chunks: AsyncIterator[bytes]) -> AsyncIterator[Frame]:
    """The frames of an open stream; one that was cut in the middle is not given out."""
    rest = b""
    async for chunk in chunks:
        *blocks, rest = (rest + chunk).split(b"\n\n")
        for block in blocks:
            yield read_frame(block)


def read_frame(block: bytes) -> Frame:
    """One block of lines.

    Raises:
        MalformedStream: it is not UTF-8, or has an unknown or a repeated field.
    """
    try:
        text = block.decode()
    except UnicodeDecodeError:
        raise MalformedStream(f"not UTF-8: {block[:200]!r}") from None
    fields: dict[str, str] = {}
    for line in text.split("\n"):
        if line.startswith(":") or not line:
            continue
        name, colon, value = line.partition(":")
        if not colon or name not in _FIELDS or name in fields:
            raise MalformedStream(f"unknown line {line[:200]!r}")
        fields[name] = value.removeprefix(" ")
    return Frame(fields.get("id"), fields.get("event", "message"), fields.get("data"))
