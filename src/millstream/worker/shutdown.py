"""One way for a process to be told to stop, and for its loops to notice."""

import asyncio
import os
import signal
from typing import Any


class Shutdown:
    """Set once by SIGTERM, SIGINT or by `begin`; a second signal ends the process at once."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self._kept: set[asyncio.Task[Any]] = set()

    def install(self) -> None:
        """Take over the signals of this process."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self.begun:
            os._exit(128 + number)
        self.begin()

    @property
    def begun(self) -> bool:
        """Whether the process has been told to stop."""
        return self._begun.is_set()

    def begin(self) -> None:
        """Ask everything to end."""
        self._begun.set()

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Hold a task that nobody awaits, so that it is not collected half done."""
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    async def first(self, *tasks: asyncio.Task[Any]) -> bool:
        """Wait for the stop or for one of the tasks; True when a task was first."""
        stop = asyncio.create_task(self._begun.wait())
        try:
            await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        return any(task.done() for task in tasks)
