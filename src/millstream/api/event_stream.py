"""The response of an event stream, and the loop that writes it.

sse-starlette's `EventSourceResponse` runs four tasks in a task group for each stream and a cancel
scope for each piece. This one does what that does (its headers, a client that goes away ends the
stream, so does one that takes nothing, the pod's end is the stream's own affair) with none of them:
the loop runs in the request's task, on the bare connection. On any other server it is left to it.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, cast

from sse_starlette import EventSourceResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from millstream.api.silence import Silence
from millstream.api.wire import WIRE, Wire
from millstream.shared.events import TOKEN, Event

logger = logging.getLogger(__name__)

HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store, no-transform",  # caches and compressing proxies keep off
    "X-Accel-Buffering": "no",  # nginx passes each piece on as it comes
}
# A call to Redis may swallow a cancellation, and a stream without a client must end.
CANCEL_AGAIN_S = 1.0


class Shortcut:
    """From the feed to the connection, while the stream's own loop waits: no task is woken.

    Args:
        frames: Writes token events down.
        silence: Of the stream.
    """

    __slots__ = ("_frames", "_silence", "wire")

    def __init__(self, frames: Callable[[Sequence[Event]], str], silence: Silence) -> None:
        self._frames = frames
        self._silence = silence
        self.wire: Wire | None = None
        """None: what comes has to wait its turn."""

    def __call__(self, events: Sequence[Event]) -> bool:
        """Send events; False: that is for the loop to do."""
        wire = self.wire
        if wire is None or not wire.clear or events[-1].kind != TOKEN:
            return False
        if text := self._frames(events):
            wire.write(text.encode())
            self._silence.told()
        else:
            self._silence.heard()
        return True


class Unfinished(Exception):
    """Raised by content that has no more to say and must not look whole: the client is cut."""


class EventStream(Response):
    """A stream of frames, which goes on when the request is over and done with.

    Args:
        content: The frames. The first comes at once.
        shortcuts: What may write past it once that has been sent.
        send_timeout_s: A client that takes nothing for so long is cut.
        headers: More of them.
        refusal: Asked before anything is sent; what it gives is answered instead.
    """

    def __init__(
        self,
        content: AsyncGenerator[bytes],
        *shortcuts: Shortcut,
        send_timeout_s: float,
        headers: dict[str, str] | None = None,
        refusal: Callable[[], Awaitable[Response | None]] | None = None,
    ) -> None:
        # Not Response's own: it is one that has no body yet.
        self.status_code = 200
        self.background = None
        self.init_headers({**HEADERS, **(headers or {})})
        self._content = content
        self._send_timeout_s = send_timeout_s
        self._refusal = refusal
        self._stream = _Stream(content, shortcuts, send_timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Begin the response; the rest follows when the application has returned."""
        if self._refusal is not None and (instead := await self._refusal()) is not None:
            await instead(scope, receive, send)
            return
        wire: Wire | None = scope.get("extensions", {}).get(WIRE)
        if wire is None:  # another server than ours
            untyped: Any = EventSourceResponse
            whole = untyped(self._content, ping=0, send_timeout=self._send_timeout_s)
            whole.raw_headers = self.raw_headers
            await whole(scope, receive, send)
            return
        self._stream.wire = wire
        wire.hand_over(self._stream.run)
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )


class _Stream:
    """The loop."""

    __slots__ = ("_content", "_over", "_send_timeout_s", "_shortcuts", "_task", "wire")

    wire: Wire
    _task: "asyncio.Task[None]"

    def __init__(
        self, content: AsyncGenerator[bytes], shortcuts: Sequence[Shortcut], send_timeout_s: float
    ) -> None:
        self._content = content
        self._shortcuts = shortcuts
        self._send_timeout_s = send_timeout_s
        self._over = False
        """The client has gone, or the content has come to its end."""

    async def run(self, receive: Receive, send: Send) -> None:
        """Write all there is. A client that goes away, or stops taking it, is no fault."""
        self._task = task = cast("asyncio.Task[None]", asyncio.current_task())
        self.wire.watch(self._lose)
        written = False
        try:
            written = await self._write_all()
        except asyncio.CancelledError:  # the client has gone, or the server will not wait
            task.uncancel()
        finally:
            self._over = True
            self._open_shortcuts(None)
            await self._content.aclose()
        if written:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        self.wire.cut()
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _write_all(self) -> bool:
        """Write to the end; whether that was reached."""
        wire = self.wire
        try:
            async for frames in self._content:
                if not (wire.clear or await self._cleared()):
                    return False
                wire.write(frames)
                self._open_shortcuts(wire)
        except Unfinished:
            return False
        return True

    async def _cleared(self) -> bool:
        """Wait until the client takes something; whether it does in time."""
        self._open_shortcuts(None)  # or they would overtake what is to be written
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self.wire.drain()
        except TimeoutError:
            logger.info("cut a reader that took nothing for %g s", self._send_timeout_s)
            return False
        return True

    def _open_shortcuts(self, wire: Wire | None) -> None:
        for shortcut in self._shortcuts:
            shortcut.wire = wire

    def _lose(self) -> None:
        if not self._over:
            self._task.cancel()
            self._task.get_loop().call_later(CANCEL_AGAIN_S, self._lose)
