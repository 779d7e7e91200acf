"""Children's output: bytes to lines, and which lines a person wants to see unasked."""

import json
import re
from typing import Any

LONGEST_LINE = 8192
"""Longer lines are cut: nobody reads them, and they must not fill the memory."""

_LEVEL = re.compile(r"^\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\S+: ")
_CALM = frozenset({"DEBUG", "INFO"})
# Escape sequences and the like could rewrite the terminal; they reach logs through requests.
_CONTROL = {code: None for code in (*range(32), 127, *range(128, 160)) if code != ord("\t")}


class LineSplitter:
    """Joins pieces of output into lines; a carriage return ends one, as progress bars use it."""

    def __init__(self) -> None:
        self._unread = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that these bytes complete."""
        *lines, self._unread = (self._unread + data).replace(b"\r", b"\n").split(b"\n")
        if len(self._unread) > LONGEST_LINE:
            lines.append(self._unread)
            self._unread = b""
        return [line for piece in lines if (line := _clean(piece))]

    def rest(self) -> list[str]:
        """What came after the last line's end."""
        line, self._unread = _clean(self._unread), b""
        return [line] if line else []


class Calm:
    """Lets warnings and worse through, with the lines that belong to them.

    What is not a log record (a progress bar, a library's print) shares the fate of the record
    before it: after a warning it is its traceback.
    """

    def __init__(self) -> None:
        self._showing = False

    def shows(self, line: str) -> bool:
        """Whether to show the next line of a process."""
        level = level_of(line)
        if level is not None:
            self._showing = level not in _CALM
        return self._showing


def level_of(line: str) -> str | None:
    """The level of a log record, in either of our formats; None if the line is not one."""
    if match := _LEVEL.match(line):
        return match[1]
    record = _json_record(line)
    return None if record is None else str(record["level"]).upper()


def message_of(line: str) -> str:
    """A log record without its time, level and logger; another line as it is."""
    if match := _LEVEL.match(line):
        return line[match.end() :]
    record = _json_record(line)
    return line if record is None else str(record["message"])


def _json_record(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        record: Any = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"level", "message"} <= record.keys() else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


def _clean(line: bytes) -> str:
    text = line[:LONGEST_LINE].decode("utf-8", "replace")
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).translate(_CONTROL).rstrip()
