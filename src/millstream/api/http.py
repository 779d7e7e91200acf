"""HTTP as uvicorn reads it, with bounds: a request's head may neither be endless nor take for ever.

httptools, uvicorn's faster parser, bounds neither; what it has not parsed to the end stays in
memory, and a client that says nothing keeps its socket.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millstream.api.errors import error_object
from millstream.api.security_headers import ALWAYS, UNLESS_SAID
from millstream.api.wire import WIRE, Wire, then_stream
from millstream.shared.schemas import to_json

HEAD_BYTES = 65_536  # request line and headers; nginx's default is half of that
HEAD_S = 30.0
CUT = "millstream.cut"
"""The ASGI extension that drops a connection whose client takes nothing."""
# An error that no application has seen tells nothing of anyone, so every page may read it.
_HEADERS = b"".join(
    b"%s: %s\r\n" % pair for pair in (*ALWAYS, *UNLESS_SAID, (b"access-control-allow-origin", b"*"))
)
_RESET = struct.pack("ii", 1, 0)  # linger for 0 s


def reset(transport: Any) -> None:
    """End a connection by a reset.

    A plain close waits until the client has taken all that is on its way, here and in the kernel,
    which for this client may be never.
    """
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol; also answers what is no HTTP in the shape of all other errors."""

    _head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None
    on_lost: Callable[[], None] | None = None
    """Told when the connection is lost: the stream that runs on it."""

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self.app: Any = partial(then_stream, self.app)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer, and tell the stream."""
        self._end_head()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Count what comes before the headers are complete."""
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:  # the next request on a connection kept alive
                self._begin_head(len(data))
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, "The request's headers are too large.", "headers_too_large")

    def on_headers_complete(self) -> None:
        """The head is over."""
        self._in_head = False
        self._end_head()
        extensions: dict[str, Any] = {CUT: {"now": self.cut}}
        self.scope["extensions"] = extensions
        super().on_headers_complete()
        extensions[WIRE] = Wire(self)

    def on_message_complete(self) -> None:
        """What comes next is another head; how long to wait for it is the keep-alive's affair."""
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(400, f"{msg.removesuffix('.')}.", "invalid_http")

    def cut(self) -> None:
        """Drop the client."""
        reset(self.transport)

    def _begin_head(self, size: int = 0) -> None:
        self._in_head = True
        self._head_bytes = size
        self._head_timer = self.loop.call_later(HEAD_S, self._too_late)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_late(self) -> None:
        self._head_timer = None
        if self._in_head and not self.transport.is_closing():
            self._refuse(408, f"No request came within {HEAD_S:g} s.", "request_timeout")

    def _refuse(self, status: int, message: str, code: str) -> None:
        body = to_json(error_object(message, status=status, code=code))
        reasons = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Header Fields Too Large"}
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"%sconnection: close\r\n\r\n%s" % (status, reasons[status], len(body), _HEADERS, body)
        )
        self.transport.close()
