"""A process's way to Redis: a small TCP proxy that can be made slow, cut, or silent."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

_CHUNK = 65536
_BY_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close sends RST, and not what is left to send

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Link:
    """Stands between one process and the database.

    What is delayed or held back is delivered later, as TCP does; only a reset loses anything.

    Args:
        connect: Opens a connection to the database, for each that the process makes.
    """

    def __init__(self, connect: Callable[[], Awaitable[Streams]]) -> None:
        self._connect = connect
        self._server: asyncio.Server | None = None
        self._delay_s = 0.0
        self._passing = asyncio.Event()
        self._passing.set()
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def url(self) -> str:
        """Where the process finds it."""
        assert self._server is not None  # noqa: S101 - entered before
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def healthy(self) -> bool:
        """Whether it passes everything on at once."""
        return not self._delay_s and self._passing.is_set()

    @property
    def connections(self) -> int:
        """How many the process has."""
        return len(self._connections)

    async def __aenter__(self) -> "Link":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2)

    def slow_down(self, delay_s: float) -> None:
        """Hold each piece up for so long, in both directions."""
        self._delay_s = delay_s

    def silence(self) -> None:
        """Let nothing through; connections stay, as with a cable that was pulled."""
        self._passing.clear()

    def heal(self) -> None:
        """Be a plain wire again."""
        self._delay_s = 0.0
        self._passing.set()

    def reset(self) -> None:
        """Cut all connections at once."""
        for writer in self._connections.values():
            end: Any = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):  # closed already
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _BY_RESET)
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - the server runs this in one
        self._connections[task] = writer
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._join(reader, writer)
        finally:
            del self._connections[task]
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        below_reader, below_writer = await self._connect()
        ways = {
            asyncio.create_task(self._pass(reader, below_writer)),
            asyncio.create_task(self._pass(below_reader, writer)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            below_writer.transport.abort()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            await self._passing.wait()
            writer.write(data)
            await writer.drain()
