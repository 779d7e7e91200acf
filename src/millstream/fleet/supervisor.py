"""Keeps one process of the fleet running, and ends it in order."""

import asyncio
import contextlib
import signal
import time
from collections import Counter

from millstream.fleet.backoff import LONGEST_S, Backoff
from millstream.fleet.guard import Guard
from millstream.fleet.lifeline import MARK
from millstream.fleet.log_lines import Calm, message_of
from millstream.fleet.plan import ProcessSpec
from millstream.fleet.process import Process, hold_command
from millstream.fleet.screen import Screen
from millstream.shared.errors import MillstreamError

HOPELESS = 2
"""The exit code for wrong settings, which no second start heals."""

DRAIN_MARGIN_S = 3.0
"""What a process may take on top of DRAIN_S to end its interpreter."""

_SHOWN_LINES = 8
_COMPLAINT = "millstream: "
"""How the line begins by which the command says why it ends."""
_KILL_AGAIN_S = 0.2


class Supervisor:
    """Starts a process again whenever it ends, until told to stop."""

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        guard: Guard,
        screen: Screen,
        verbose: bool = False,
        longest_wait_s: float = LONGEST_S,
    ) -> None:
        self.spec = spec
        self.ends: Counter[int] = Counter()
        """How often the process ended unasked, by exit code."""
        self._longest_wait_s = longest_wait_s
        self._guard = guard
        self._screen = screen
        self._verbose = verbose
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._process: Process | None = None
        self._ready_at: float | None = None
        self._held: str | None = None
        """A complaint that waits for the process's end, at which it may be told otherwise."""

    @property
    def pid(self) -> int:
        """The id of the process that runs now; 0 where none does."""
        return self._process.pid if self._process and self._process.running else 0

    @property
    def ready(self) -> bool:
        """Whether the process that runs now has become ready."""
        return self._ready_at is not None

    def mark_ready(self) -> None:
        """The process that runs now has joined the fleet."""
        if self._ready_at is None:
            self._ready_at = time.monotonic()

    async def run(self) -> None:
        """Keep the process running until told to stop.

        Raises:
            MillstreamError: it ends for a reason that stays.
        """
        backoff = Backoff(self._longest_wait_s)
        try:
            while not self._stopping.is_set():
                await self._run_once(backoff)
        finally:
            self._ended.set()

    async def stop(self, *, drain_s: float, force: asyncio.Event) -> None:
        """Let the process drain and wait for its end; with `force`, or too late, kill it."""
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()
        ended = asyncio.create_task(self._ended.wait())
        forced = asyncio.create_task(force.wait())
        await asyncio.wait(
            {ended, forced},
            timeout=drain_s + DRAIN_MARGIN_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        forced.cancel()
        if not ended.done() and not force.is_set():
            self._screen.warn(f"{self.spec.name} did not drain in {drain_s:g} s and is killed")
        while not ended.done():
            # Again, since it may just be starting.
            if self._process is not None:
                self._process.kill()
            await asyncio.wait({ended}, timeout=_KILL_AGAIN_S)

    async def _run_once(self, backoff: Backoff) -> None:
        try:
            process = await self._start()
        except OSError as error:  # no room for another process, which may pass
            await self._pause(f"cannot be started ({error.strerror})", backoff.after(0))
            return
        code = await process.wait()
        # What it forked and left behind holds ports and memory that the next one needs.
        process.kill()
        self._guard.forget(process.pid)
        if self._stopping.is_set():
            self._show_held()
            return
        self.ends[code] += 1
        if code == HOPELESS:
            raise MillstreamError(f"{self.spec.name} cannot start: {_reason(process)}")
        ready_for_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        if not self.ready:
            for line in list(process.tail)[-_SHOWN_LINES:]:
                self._screen.child_line(self.spec.name, line)
        else:
            self._show_held()
        await self._pause(how_it_ended(code), backoff.after(ready_for_s))

    def _show_held(self) -> None:
        if self._held is not None:
            self._screen.child_line(self.spec.name, self._held)
            self._held = None

    async def _pause(self, what: str, wait_s: float) -> None:
        self._screen.warn(f"{self.spec.name} {what}; it is started again in {wait_s:g} s")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), wait_s)

    async def _start(self) -> Process:
        self._ready_at = self._held = None
        calm = Calm()

        def show(line: str) -> None:
            self._show_held()
            if not (calm.shows(line) or self._verbose):
                return
            if line.startswith(_COMPLAINT):
                self._held = line
            else:
                self._screen.child_line(self.spec.name, line)

        process = self._process = Process(
            hold_command(self.spec.command),
            environment={**self.spec.environment, MARK: self._guard.mark},
            on_line=show,
        )
        await process.start()
        self._guard.adopt(process.pid)
        if self._stopping.is_set():
            process.terminate()
        return process


def how_it_ended(code: int) -> str:
    """An exit code, or the signal it stands for, in words."""
    # 128 + n is a signal, too, reported by a shell's rule.
    number = -code if code < 0 else code - 128
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit code {code}"


def _reason(process: Process) -> str:
    if not process.tail:
        return "it gave no reason"
    return message_of(process.tail[-1]).removeprefix("millstream: ")
