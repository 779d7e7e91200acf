"""Where a test's link to Redis leads, which the test may count, change, and make deaf."""

import asyncio
from collections.abc import Awaitable, Callable

from millstream.fleet.chaos.link import Streams


class Way:
    """The far ends of a link's connections: `Link(Way(store.connect))`."""

    def __init__(self, connect: Callable[[], Awaitable[Streams]]) -> None:
        self.connect = connect
        """Where the next connection leads."""
        self.made = 0
        """Connections that were made."""
        self._writers: list[asyncio.StreamWriter] = []

    async def __call__(self) -> Streams:
        self.made += 1
        reader, writer = await self.connect()
        self._writers.append(writer)
        return reader, writer

    def deafen(self) -> None:
        """Let nothing come back any more on the connections there are; new ones are sound."""
        for writer in self._writers:
            if not writer.is_closing():
                writer.transport.pause_reading()
