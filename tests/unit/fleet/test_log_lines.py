"""Bytes become lines, whatever their pieces; calm output keeps warnings and their tracebacks."""

import pytest

from millstream.fleet.log_lines import (
    LONGEST_LINE,
    Calm,
    LineSplitter,
    level_of,
    message_of,
)

INFO = "12:00:00 INFO    millstream.worker: ready"
WARNING = "12:00:00 WARNING millstream.worker: Redis is away"
JSON_ERROR = '{"time": "…", "level": "error", "logger": "millstream", "message": "no room"}'


def test_lines_are_joined_from_any_pieces() -> None:
    text = "Grüße\r\nzwei\n\ndrei".encode()
    splitter = LineSplitter()
    lines = [line for byte in text for line in splitter.feed(bytes([byte]))]
    assert lines + splitter.rest() == ["Grüße", "zwei", "drei"]
    assert splitter.rest() == []


def test_a_progress_bar_is_many_lines() -> None:
    assert LineSplitter().feed(b"10%\r20%\r30%\n") == ["10%", "20%", "30%"]


def test_endless_lines_do_not_fill_the_memory() -> None:
    splitter = LineSplitter()
    lines = [line for _ in range(100) for line in splitter.feed(b"x" * 1000)]
    assert 10 <= len(lines) <= 13
    assert all(len(line) <= LONGEST_LINE for line in lines)


def test_nothing_rewrites_the_terminal() -> None:
    assert LineSplitter().feed(b"\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J \xff\n") == [
        "red ]0;title \ufffd2J \ufffd"
    ]


@pytest.mark.parametrize(
    ("line", "level"),
    [
        (INFO, "INFO"),
        (WARNING, "WARNING"),
        (JSON_ERROR, "ERROR"),
        ("INFO is a word", None),
        ("{not json", None),
        ('{"level": "info"}', None),
        ("[1]", None),
    ],
)
def test_levels(line: str, level: str | None) -> None:
    assert level_of(line) == level


def test_messages_lose_what_a_log_puts_before_them() -> None:
    assert message_of(WARNING) == "Redis is away"
    assert message_of(JSON_ERROR) == "no room"
    assert message_of("plain") == "plain"


def test_calm_output_keeps_warnings_with_what_follows_them() -> None:
    calm = Calm()
    lines = ["Loading: 3%", INFO, "print", WARNING, "Traceback", "  File", INFO, "print"]
    assert [line for line in lines if calm.shows(line)] == [WARNING, "Traceback", "  File"]
