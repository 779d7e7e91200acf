"""The parent's end of the life line: starts the guard, and tells it whom to watch over."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence

from millstream.fleet.lifeline import DATABASE_GRACE_S, MARK
from millstream.fleet.process import Process, guard_command

GRACE_S = 5.0
"""How long processes may drain after the parent was killed: handing tasks over takes far less."""

_END_S = DATABASE_GRACE_S + GRACE_S


class Guard:
    """Watches over the fleet and runs its database, in that one process (see `lifeline`)."""

    def __init__(
        self,
        mark: str,
        *,
        command: Sequence[str] = (),
        on_line: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.mark = mark
        self._command = command
        self._on_line = on_line
        self._process: Process | None = None
        self._pipe: int | None = None
        self._leaders: set[int] = set()

    @property
    def tail(self) -> list[str]:
        """The last lines that the database wrote."""
        return list(self._process.tail) if self._process else []

    async def start(self, *, keep: Sequence[int] = ()) -> None:
        """Start the guard, again if it has ended; it inherits the descriptors to keep."""
        self._close_pipe()
        read_end, self._pipe = os.pipe()
        self._process = Process(
            guard_command(self.mark, grace_s=GRACE_S, command=self._command),
            environment={MARK: self.mark},
            on_line=self._on_line,
            keep=keep,
            stdin=read_end,
        )
        try:
            await self._process.start()
        finally:
            os.close(read_end)
        for leader in self._leaders:
            self._tell(f"+{leader}")

    async def wait(self) -> int:
        """Wait for the guard's end, which is the database's if it runs one."""
        assert self._process is not None  # noqa: S101 - started before
        return await self._process.wait()

    def adopt(self, pid: int) -> None:
        """Watch over a process that leads a group."""
        self._leaders.add(pid)
        self._tell(f"+{pid}")

    def forget(self, pid: int) -> None:
        """The process has ended, with its group."""
        self._leaders.discard(pid)
        self._tell(f"-{pid}")

    async def close(self) -> None:
        """End what is left, the database last."""
        self._close_pipe()
        if self._process is None or not self._process.running:
            return
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _tell(self, change: str) -> None:
        # A guard that has just died is started again, and hears of everyone then.
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe, f"{change}\n".encode())

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
