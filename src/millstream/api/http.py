"""HTTP as uvicorn reads it, with bounds: a request's head may neither be endless nor take for ever.

httptools, uvicorn's faster parser, bounds neither; what it has not parsed to the end stays in
memory, and a client that says nothing keeps its socket.

And with a client's own time: what it sends ahead waits until what it asked before is answered, and
is read from the socket all the same, or nobody would see it go; what is wrong with it is told after
the answer, as is the end of a connection whose client says no more.
"""

import asyncio
import socket
import struct
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millstream.api.errors import error_object
from millstream.api.flag import Flag
from millstream.api.security_headers import ALWAYS, UNLESS_SAID
from millstream.api.wire import WIRE, Wire, then_stream
from millstream.shared.schemas import to_json

HEAD_BYTES = 65_536  # request line and headers; nginx's default is half of that
HEAD_S = 30.0
AHEAD_BYTES = 65_536  # of what is sent ahead; more stays in the socket
# Requests are parsed so much at a time: a quarter of a megabyte of them, sent at once behind one
# that is not answered, would be 13,000, made in a second of the pod's time.
PIECE_BYTES = 4096
# What a body may be wrapped in: a chunk of one byte has five more.
FRAMING = 8
_OFFER = (b"upgrade", b"http2-settings")
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

    # Apart from uvicorn's own: with more than 30 attributes objects share no table of their names.
    __slots__ = (
        "_ahead", "_answering", "_declined", "_half_closed", "_head_bytes", "_head_timer",
        "_in_head", "_refusal",
    )  # fmt: skip

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        uvicorns: Any = self
        uvicorns.flow._is_writable_event = Flag(is_set=True)
        self.app: Any = partial(then_stream, self.app)
        self._answering: list[Wire] = []
        """The requests that have no whole answer yet, the oldest first; it alone is at work."""
        self._ahead: bytearray | None = None
        """What came while a request was being answered."""
        self._refusal = b""
        """The answer to what came then and is no request; the last one."""
        self._half_closed = False
        """The client says no more."""
        self._declined = b""
        """The head of a request that would rather speak something else, without that."""
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer, and tell who answers."""
        self._end_head()
        super().connection_lost(exc)
        self._ahead = None
        while self._answering:
            self._answering.pop(0).lose()

    def eof_received(self) -> Any:  # uvicorn says None, asyncio asks for a bool
        """Tell who is long about an answer; whether there is any to be given."""
        self._half_closed = True
        for wire in tuple(self._answering):
            wire.leave()
        return self._busy

    @property
    def _busy(self) -> bool:
        """Whether a request that has been read to its end is being answered."""
        waiting = len(self._answering)
        return waiting > 1 or (waiting == 1 and not self.cycle.more_body)

    def data_received(self, data: bytes) -> None:
        """Count what comes before the headers are complete; let wait what comes too early."""
        if self._refusal:
            return
        for at in range(0, len(data), PIECE_BYTES):
            if self._busy:
                self._hold(data[at:])
                return
            self._parse(data[at : at + PIECE_BYTES])
            if self._refusal or self.transport.is_closing():
                return
            if self.transport.get_protocol() is not self:
                return  # it is a WebSocket now

    def _hold(self, data: bytes) -> None:
        self._ahead = self._ahead or bytearray()
        self._ahead += data
        if len(self._ahead) > AHEAD_BYTES:
            self.flow.pause_reading()

    def _parse(self, data: bytes) -> None:
        self._head_bytes += len(data)
        if (
            self._in_head and self._head_timer is None
        ):  # the next request of a connection kept alive
            self._begin_head(len(data))
        self._feed(data)
        if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, "The request's headers are too large.", "headers_too_large")
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn pauses it: it has no other place for what comes

    def _feed(self, data: bytes) -> None:
        """As uvicorn, but for an offer that is declined, whose body httptools would pass over."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            head, self._declined = self._declined, b""
            if head:
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self._feed(head + data[upgrade.args[0] :])
            elif self._should_upgrade():
                self.handle_websocket_upgrade()
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _should_upgrade(self) -> bool:
        """Whether it is the beginning of a WebSocket."""
        return self.parser.get_method() == b"GET" and super()._should_upgrade()

    def _head_without_offer(self) -> bytes:
        """The head again: HTTP/2 and the like are not spoken here (RFC 9110, 7.8)."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % pair for pair in self.headers if pair[0] not in _OFFER]
        return b"\r\n".join([*lines, b"", b""])

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep it, unless it comes behind the body: those are nobody's here."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is over."""
        offered = any(name == b"upgrade" for name, _ in self.headers)
        if offered and self.parser.should_upgrade() and not self._should_upgrade():
            self._declined = self._head_without_offer()
            return
        before = self.cycle
        self._in_head = False
        self._head_bytes = 0
        self._end_head()
        extensions: dict[str, Any] = {CUT: {"now": self.cut}}
        self.scope["extensions"] = extensions
        super().on_headers_complete()
        if self.cycle is before:
            return  # a WebSocket's
        uvicorns: Any = self
        uvicorns.cycle.message_event = Flag()
        extensions[WIRE] = wire = Wire(self)
        self._answering.append(wire)

    def on_body(self, body: bytes) -> None:
        """Keep it, unless its request is being answered without it."""
        self._head_bytes = max(0, self._head_bytes - (1 + FRAMING) * len(body))
        if not (self._answering and self.cycle.response_started):
            super().on_body(body)

    def on_message_complete(self) -> None:
        """What comes next is another head; how long to wait for it is the keep-alive's affair."""
        if self._declined:
            return
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    def on_response_complete(self) -> None:
        """Go on with what has come meanwhile."""
        if self._answering:
            self._answering.pop(0)
        super().on_response_complete()
        if self._ahead and not self._busy and not self.transport.is_closing():
            data, self._ahead = bytes(self._ahead), None
            self.data_received(data)
        if (self._refusal or self._half_closed) and not self._busy:
            if not self.transport.is_closing():
                self.transport.write(self._refusal)
            self.transport.close()

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over, if it is free."""
        if self._answering:
            self.send_400_response("A connection is upgraded by its first request.")
        else:
            super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(400, f"{msg.removesuffix('.')}.", "invalid_http")

    def cut(self) -> None:
        """Drop the client."""
        reset(self.transport)

    def _begin_head(self, size: int = 0) -> None:
        self._in_head = True
        self._head_bytes = size
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(HEAD_S, self._too_late)

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
        refusal = (
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"%sconnection: close\r\n\r\n%s" % (status, reasons[status], len(body), _HEADERS, body)
        )
        if self._busy:
            self._refusal = refusal
        elif self._answering and self.cycle.response_started:
            self.cut()  # the answer has begun before its request was read; it cannot end any more
        else:
            self.transport.write(refusal)
            self.transport.close()
