"""One child process of the fleet: started under the guard, its output read line by line."""

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from millstream.fleet import lifeline
from millstream.fleet.log_lines import LineSplitter

TAIL_LINES = 40
"""Enough for a traceback."""

_LIFELINE = (sys.executable, "-I", "-S", str(Path(lifeline.__file__)))
# A forked helper that outlives its parent holds the pipe open; what the parent said has come.
_LAST_WORDS_S = 0.3


def hold_command(command: Sequence[str]) -> list[str]:
    """The command, made to die with this process."""
    return [*_LIFELINE, "hold", str(os.getpid()), *command]


def guard_command(mark: str, *, grace_s: float, command: Sequence[str]) -> list[str]:
    """The guard over all that is marked, which also runs the command."""
    return [*_LIFELINE, "guard", mark, str(grace_s), *command]


class Process:
    """A child in a session of its own, so that a terminal's Ctrl-C reaches only the parent."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        on_line: Callable[[str], None],
        keep: Sequence[int] = (),
        stdin: int | None = None,
    ) -> None:
        self._command = command
        self._environment = environment
        self._on_line = on_line
        self._keep = keep
        self._stdin = stdin
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        """Whether the process has been started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process; call this from the main thread, whose end the kernel watches."""
        # A pipe of our own: asyncio's would make `wait` wait for its end, which a forked helper of
        # the process can put off.
        read_end, write_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL if self._stdin is None else self._stdin,
                stdout=write_end,
                stderr=write_end,
                env={**os.environ, **self._environment},
                pass_fds=self._keep,
                start_new_session=True,
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._reading = asyncio.create_task(self._read(read_end))

    async def wait(self) -> int:
        """Wait for the end; the exit code, negative for a signal."""
        assert self._process is not None  # noqa: S101 - started before
        code = await self._process.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=_LAST_WORDS_S)
            self._reading.cancel()
        return code

    def terminate(self) -> None:
        """Ask the process to drain; a stopped one is woken to hear it."""
        if self.running:
            lifeline.send(self.pid, signal.SIGTERM)
            lifeline.send(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process, and all that it forked, now."""
        if self._process is not None:
            lifeline.kill_group(self.pid)

    async def _read(self, read_end: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
        )
        splitter = LineSplitter()
        with contextlib.closing(transport):
            while data := await reader.read(65536):
                for line in splitter.feed(data):
                    self._take(line)
            for line in splitter.rest():
                self._take(line)

    def _take(self, line: str) -> None:
        self.tail.append(line)
        self._on_line(line)
