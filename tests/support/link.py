"""A TCP link that a test may worsen: slower, silent, cut, or leading to another server."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST, and not what is left to send


class _Pair:
    """One connection through the link."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near = near
        self.far = far
        self.silent = False

    def reset(self) -> None:
        for writer in (self.near, self.far):
            connection: socket.socket = writer.get_extra_info("socket")
            with suppress(OSError):  # closed already
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


class Link:
    """Passes bytes to `target`, a port of this machine, and back, as well as it is told to."""

    def __init__(self, target: int, *, database: int = 0) -> None:
        self.target = target
        self.database = database
        self.delay_s = 0.0
        """How long each answer takes on its way back."""
        self.made = 0
        """Connections made through the link."""
        self.port = 0
        self._pairs: set[_Pair] = set()
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The link, for a client of Redis."""
        return f"redis://127.0.0.1:{self.port}/{self.database}"

    @property
    def open(self) -> int:
        """Connections that are open now."""
        return len(self._pairs)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Link"]:
        """Take connections, until the context ends and all of them with it."""
        server = await asyncio.start_server(self._take, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.reset()
            await asyncio.gather(*self._serving)
            await server.wait_closed()

    def reset(self) -> int:
        """Cut all connections by a reset; how many there were."""
        cut = list(self._pairs)
        for pair in cut:
            pair.reset()
        return len(cut)

    def silence(self) -> int:
        """Make black holes of the connections there are: what is sent on them is never answered,
        and nobody is told. New ones are sound."""
        for pair in self._pairs:
            pair.silent = True
        return len(self._pairs)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.made += 1
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        pair = _Pair(writer, far_writer)
        self._pairs.add(pair)
        there = asyncio.create_task(self._pass(pair, reader, far_writer, delayed=False))
        back = asyncio.create_task(self._pass(pair, far_reader, writer, delayed=True))
        try:
            await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (there, back):
                task.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
            self._pairs.discard(pair)
            for end in (writer, far_writer):
                end.close()

    async def _pass(
        self,
        pair: _Pair,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        delayed: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, piece = await pieces.get()
                await asyncio.sleep(due - loop.time())
                if not pair.silent:
                    writer.write(piece)
                    await writer.drain()

        delivering = asyncio.create_task(deliver())
        try:
            with suppress(OSError):
                while piece := await reader.read(65_536):
                    pieces.put_nowait((loop.time() + self.delay_s * delayed, piece))
        finally:
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)
