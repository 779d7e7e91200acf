"""Output that nobody reads does no harm; a terminal gets its lines whole."""

import io
import os
import subprocess
import sys

from millstream.fleet.screen import Screen

TALK = """
from millstream.fleet.screen import Screen
screen = Screen()
for number in range(3):
    screen.say(f"line {number}")
    screen.warn("careful")
    screen.child_line("api-0", "hello")
    screen.working("loading")
screen.close()
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_on_pipes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TALK], check=True, capture_output=True, text=True, timeout=10
    )
    assert done.stdout == "line 0\nline 1\nline 2\n"
    assert done.stderr == "careful\napi-0 | hello\n" * 3


def test_a_reader_that_goes_away_does_no_harm() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-c", TALK],
            check=False,
            stdout=write_end,
            stderr=write_end,
            timeout=10,
        )
    finally:
        os.close(write_end)
    assert done.returncode == 0


def test_on_a_terminal_long_lines_stay_whole_and_brackets_are_text() -> None:
    terminal = Terminal()
    screen = Screen(stdout=terminal, stderr=terminal)
    assert screen.moving
    screen.working("[loading]")
    line = "curl [bold]" + "x" * 300
    screen.say(line)
    screen.close()
    assert line in terminal.getvalue()
    assert "[loading]" in terminal.getvalue()
