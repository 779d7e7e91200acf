"""Logging: one line a record, as text or JSON, to stderr, and no secret in any of them."""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Literal

# No line of ours holds a secret; these are for those of libraries, and for what a traceback quotes.
_SECRETS = (
    (re.compile(r"(?i)(\bbearer\s+)[^\s\"'\\,]+"), r"\1***"),
    (re.compile(r"(?i)([?&]\w*(?:ticket|key|token|password|secret)=)[^&\s\"'\\]+"), r"\1***"),
    (re.compile(r"(\w://[^:@/\s\"']*:)[^@\s\"']+@"), r"\1***@"),
    (re.compile(r"\bms-[\w-]{43}"), "ms-***"),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"), "eyJ***"),
)


def hide_secrets(line: str) -> str:
    """The line without what looks like a key, a token, a ticket, or a password in a URL."""
    for pattern, shown in _SECRETS:
        line = pattern.sub(shown, line)
    return line


_process: dict[str, object] = {}


def name_process(**fields: str) -> None:
    """Have every JSON line of this process say these, such as its `worker_id`."""
    _process.update(fields)


class Flood(logging.Filter):
    """Lets ten lines a second of one kind pass; the next that does says how many did not.

    A kind is what the code says, before its arguments are filled in: one fault that meets a
    thousand requests is one kind.
    """

    MOST, WINDOW_S = 10, 1.0
    MOST_KINDS = 256  # of libraries that fill their lines in themselves each line is a kind

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}
        """When a kind's window began, and how many lines came since."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written; logging calls this under the handler's lock or alone."""
        kind = (record.name, str(record.msg))
        since, count = self._kinds.get(kind, (record.created, 0))
        if record.created - since >= self.WINDOW_S:
            if count > self.MOST:
                record.suppressed = count - self.MOST
            since, count = record.created, 0
        if kind not in self._kinds and len(self._kinds) >= self.MOST_KINDS:
            self._kinds.clear()
        self._kinds[kind] = (since, count + 1)
        return count < self.MOST


class TextFormatter(logging.Formatter):
    """For people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Render a record, with the exception below it."""
        suppressed = getattr(record, "suppressed", 0)
        more = f"\n  ({suppressed} more like this were not written)" if suppressed else ""
        return hide_secrets(super().format(record) + more)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, for log collectors."""

    def format(self, record: logging.LogRecord) -> str:
        """Render a record; an exception becomes one field."""
        line: dict[str, object] = {
            **_process,
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("task_id", "worker_id", "attempt", "suppressed"):
            if (value := getattr(record, name, None)) is not None:
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return hide_secrets(json.dumps(line, ensure_ascii=False))


def set_up_logging(log_format: Literal["text", "json"], *, level: str = "info") -> None:
    """Send everything from a level on to stderr, in one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Flood())
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
