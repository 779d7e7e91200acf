"""HTTP for a client that must weigh little: one request a connection, answers in whole frames."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httptools

FRAME_END = b"\n\n"


class Answer(asyncio.Protocol):
    """What comes back on one connection."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self._news = asyncio.Event()
        self._ended = False
        self.begun = asyncio.get_running_loop().create_future()
        self.whole = False
        """Whether the answer came to its end, as HTTP counts."""
        self.headers: dict[str, str] = {}

    @property
    def status(self) -> int:
        """Known once it has begun."""
        return self._parser.get_status_code()

    async def body(self) -> bytes:
        """All of it."""
        while not self._ended:
            await self._news.wait()
            self._news.clear()
        return self._body

    async def frames(self) -> AsyncIterator[list[bytes]]:
        """The frames of a stream, as many at a time as have come."""
        while True:
            while FRAME_END not in self._body and not self._ended:
                await self._news.wait()
                self._news.clear()
            *frames, self._body = self._body.split(FRAME_END)
            if frames:
                yield frames
            elif self._ended:
                return

    # What asyncio and httptools call.

    def connection_made(self, transport: Any) -> None:  # uvloop's are of no class of asyncio's
        """Ask."""
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """No more comes."""
        self._end()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep it."""
        self.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        """There is an answer."""
        self.begun.set_result(None)

    def on_body(self, body: bytes) -> None:
        """Keep it for who reads."""
        self._body += body
        self._news.set()

    def on_message_complete(self) -> None:
        """All has come."""
        self.whole = True
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._news.set()
        if not self.begun.done():
            self.begun.set_exception(ConnectionError("closed before an answer"))


@asynccontextmanager
async def asked(
    port: int, path: str, body: Any = None, *, headers: dict[str, str] | None = None
) -> AsyncGenerator[Answer]:
    """Send a request, a POST if it has a body; leaving before the end hangs up.

    Raises:
        OSError: nobody listens, or the connection was lost before an answer.
    """
    head = {"Host": "bench", "Connection": "close", **(headers or {})}
    content = b""
    if body is not None:
        content = json.dumps(body).encode()
        head |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in head.items()]
    request = "\r\n".join([*lines, "", ""]).encode() + content
    transport, answer = await asyncio.get_running_loop().create_connection(
        lambda: Answer(request), "127.0.0.1", port
    )
    try:
        await answer.begun
        yield answer
    finally:
        transport.close()
