"""What the person at the terminal sees: whole lines, and while something loads, what it does."""

import contextlib
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status


class Screen:
    """Plain lines on a pipe; on a terminal also a moving line for what is under way.

    A reader that goes away (a closed terminal, `| head`) must not take the fleet down with it: what
    cannot be written is dropped.
    """

    def __init__(self, *, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr
        self._console: Console | None = None
        self._status: Status | None = None
        if self._stdout.isatty():
            import rich.console

            self._console = rich.console.Console(file=self._stdout, markup=False, highlight=False)

    @property
    def moving(self) -> bool:
        """Whether `working` is seen as one line that changes."""
        return self._console is not None

    def say(self, text: str = "") -> None:
        """A line on how the fleet does."""
        self._write(text, self._stdout, "")

    def warn(self, text: str) -> None:
        """A line on what went wrong."""
        self._write(text, self._stderr, "yellow")

    def child_line(self, name: str, line: str) -> None:
        """A line that a process of the fleet wrote."""
        self._write(f"{name} | {line}", self._stderr, "dim")

    def working(self, text: str) -> None:
        """Show what is under way; empty when nothing is. Does nothing on a pipe."""
        if self._console is None:
            return
        if not text:
            self.close()
            return
        from rich.text import Text

        with contextlib.suppress(OSError):
            if self._status is None:
                self._status = self._console.status(Text(text))
                self._status.start()
            else:
                self._status.update(Text(text))

    def close(self) -> None:
        """Give the terminal back as it was."""
        if self._status is not None:
            with contextlib.suppress(OSError):
                self._status.stop()
            self._status = None

    def _write(self, text: str, stream: TextIO, style: str) -> None:
        try:
            if self._console is not None:
                self._console.print(text, style=style, soft_wrap=True)
            else:
                stream.write(text + "\n")
                stream.flush()
        except OSError:
            # What is left in the buffer would fail again, and the last time when Python ends.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
