"""What is left of a request once its answer is a stream: the connection, and who writes to it.

Through ASGI each piece of a stream would pass some ten coroutines, and each open stream would hold
them, with the request and all that was made to answer it, for as long as it is open. So a response
that streams hands its stream over: the application returns, and the stream runs on what is left
(docs/adr/0026-a-stream-outlives-its-request.md has the figures).
"""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

WIRE = "millstream.wire"
"""The ASGI extension by which a response hands its stream over."""


class Wire:
    """A response's way to its client.

    Args:
        protocol: uvicorn's, which has just made the cycle of this request and its response.
    """

    __slots__ = (
        "_cycle", "_flow", "_left", "_lost", "_protocol", "_transport", "_when_over", "stream",
    )  # fmt: skip

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._cycle = protocol.cycle
        self._flow = protocol.flow
        self._transport = protocol.transport
        self._left = False
        self._lost: Callable[[], None] | None = None
        self._when_over: list[Callable[[], None]] | None = None
        self.stream: Callable[[Receive, Send], Awaitable[None]] | None = None
        """What goes on when the application has returned, its response begun."""

    @property
    def clear(self) -> bool:
        """Whether the client takes what it is sent."""
        return not (self._left or self._flow.write_paused)

    def hand_over(self, stream: Callable[[Receive, Send], Awaitable[None]]) -> None:
        """Have a stream go on once the application has returned."""
        self.stream = stream
        if self._cycle.scope["http_version"] < "1.1":
            self._cycle.chunked_encoding = False  # it ends with the connection (RFC 9112, 6.1)

    def write(self, data: bytes) -> None:
        """Send a piece of the body: of HTTP/1.1 a chunk (RFC 9112, 7.1), never the last."""
        if self._left or not data:
            return
        if self._cycle.chunked_encoding:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._transport.write(data)

    async def drain(self) -> None:
        """Return when the client takes something again, or has gone."""
        await self._flow.drain()

    def cut(self) -> None:
        """Drop the client, unless it has gone; by a reset, or its body might look whole."""
        cycle = self._cycle
        if cycle.disconnected:
            return
        if self._left and cycle.chunked_encoding and not cycle.transport.get_write_buffer_size():
            # It may still listen: a reset would take what is on its way to it, and a body without
            # its last chunk is not whole anyway.
            cycle.transport.close()
        else:
            self._protocol.cut()

    def watch(self, lost: Callable[[], None]) -> None:
        """Have something called when the client goes away, until `end`.

        So does one that has said all that it will (a half-closed connection): for whoever writes a
        stream, or is long about an answer, nothing tells it from one that has gone.
        """
        self._lost = lost
        self._flow.resume_reading()  # a body that nobody reads may have paused it
        if self._left:
            lost()

    def leave(self) -> None:
        """The client says no more."""
        self._left = True
        if self._lost is not None:
            self._lost()

    def lose(self) -> None:
        """The connection is lost."""
        # uvicorn tells the newest request of a connection, which may be one that waits behind us.
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        self.leave()

    def forget_request(self) -> None:
        """Let go of what only the application wanted."""
        scope = self._cycle.scope
        self._cycle.scope = {"type": scope["type"], "method": scope["method"]}
        scope["headers"].clear()
        scope.clear()

    def when_over(self, call: Callable[[], None]) -> None:
        """Have something called when the response is over, however it ends."""
        self._when_over = [*(self._when_over or ()), call]

    def end(self) -> None:
        """The response is over."""
        self._lost = None
        for call in self._when_over or ():
            call()


async def then_stream(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """An application, and then the stream that it leaves behind."""
    wire: Wire = scope["extensions"][WIRE]
    try:
        await app(scope, receive, send)
        del app, scope
        if wire.stream is not None:
            wire.forget_request()
            await wire.stream(receive, send)
    finally:
        wire.end()
