"""The event streams: what a reader of a task is sent, from the first comment to the last event."""

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from millstream.api import sse
from millstream.api.admission import Accepted
from millstream.api.choices import Turn
from millstream.api.errors import error_object
from millstream.api.http import CUT
from millstream.api.pod import Pod
from millstream.shared.connection import RedisError
from millstream.shared.errors import MillstreamError
from millstream.shared.events import Event
from millstream.shared.states import TaskState

logger = logging.getLogger(__name__)

HINT_S = 2.0
RETRY_MS = 500
# A pod that is told to go lets answers finish; one that stands still will not in its time.
CLOSING_SILENCE_S = 5.0
_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store, no-transform",  # caches and compressing proxies keep off
}


def event_stream(
    pod: Pod, content: AsyncIterator[bytes], headers: dict[str, str] | None = None
) -> EventSourceResponse:
    """A response of frames; keepalives come from the content itself, which knows the silence."""
    return _Stream(
        content,
        headers={**_HEADERS, **(headers or {})},
        ping=0,
        send_timeout=pod.settings.send_timeout_s,
    )


class _Stream(EventSourceResponse):
    """A stream whose client may stop taking it: that is the client's affair, not a fault."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except* SendTimeoutError:
            logger.info("cut a reader that took nothing for %g s", self.send_timeout)
            scope["extensions"][CUT]["now"]()
            await receive()  # until it has gone


QueuePlace = tuple[int, float | None]
"""Place in the queue from 1, and seconds until it is served, if that is known."""


class Silence:
    """Tells when a keepalive is due on one stream."""

    def __init__(self, keepalive_s: float, tick_s: float) -> None:
        # Ticks divide the keepalive evenly; half a tick of slack takes up a late timer.
        self.tick_s = keepalive_s / max(1, round(keepalive_s / tick_s))
        self._due_s = keepalive_s - self.tick_s / 2
        self._broken_at = time.monotonic()

    def broken(self) -> None:
        """Something has been sent."""
        self._broken_at = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether a keepalive must be sent now."""
        return time.monotonic() - self._broken_at >= self._due_s


async def news_of(
    pod: Pod, task_id: str, caller: str, *, after: int, model: str, queued: bool, tick_s: float
) -> AsyncGenerator[list[Event] | QueuePlace]:
    """What the reader of a task is told after an event, up to the last one.

    Yields batches of events, empty ones to look up; and the task's place in the queue, whenever
    that has changed. Ends early when the pod closes. Raises as `Relay.events`.
    """
    last_place: QueuePlace | None = None
    events = pod.relay.events(task_id, caller, after=after, tick_s=tick_s)
    async with aclosing(events):
        async for batch in events:
            if batch:
                queued = False
            elif pod.closing:
                return
            elif queued:
                try:
                    place = await pod.queue_watch.position(task_id, model)
                except RedisError:
                    place = last_place  # it still waits, as far as anyone knows
                else:
                    queued = place is not None
                if place is not None and place != last_place:
                    last_place = place
                    yield place
                    continue
            yield batch


async def native_stream(
    pod: Pod, task_id: str, caller: str, *, after: int, model: str, queued: bool
) -> AsyncIterator[bytes]:
    """The native stream of a task after event number `after`."""
    silence = Silence(pod.settings.keepalive_s, HINT_S)
    yield sse.OPENING.encode()
    news = news_of(
        pod, task_id, caller, after=after, model=model, queued=queued, tick_s=silence.tick_s
    )
    ended = False
    async with aclosing(news):
        try:
            async for told in news:
                if isinstance(told, tuple):
                    frames = sse.queued_frame(*told)
                else:
                    frames = "".join(map(sse.native_frame, told))
                    ended = bool(told) and told[-1].terminal
                if not frames and silence.due:
                    frames = sse.PING
                if frames:
                    yield frames.encode()
                    silence.broken()
            if not ended and pod.closing:
                yield sse.retry_frame(RETRY_MS).encode()
        except MillstreamError as error:
            yield sse.error_frame(error_object(error.message, status=500, code=error.code)).encode()


class AnswerFrames(Protocol):
    """How a form of the API writes the events of one choice down."""

    @property
    def ping(self) -> str:
        """A keepalive."""
        ...

    @property
    def resumable(self) -> bool:
        """Whether another pod can go on from any frame: then a pod that must go cuts at once."""
        ...

    def opening(self) -> str:
        """What comes before the first event."""
        ...

    def frames(self, events: Sequence[Event]) -> str:
        """The frames of token events."""
        ...

    def ending(self, event: Event) -> str:
        """The frames of the last event: nothing is called finished that is not."""
        ...

    def trouble(self, error: dict[str, Any]) -> str:
        """An error of the stream: whatever becomes of the task, its answer ends here."""
        ...

    def farewell(self, error: dict[str, Any]) -> str:
        """The last words of a pod that goes before the answer has ended."""
        ...


async def answer_stream(
    pod: Pod,
    accepted: Accepted,
    caller: str,
    *,
    choices: Sequence[AnswerFrames],
    turns: AsyncIterator[Turn],
    silence: Silence,
) -> AsyncIterator[bytes]:
    """The stream of an answer. A client that goes away ends its tasks, at once or later.

    A choice that was stopped or has failed ends all: the answer cannot be finished any more.
    """
    left = len(choices)
    heard_at = time.monotonic()
    try:
        yield (sse.OPENING + "".join(frames.opening() for frames in choices)).encode()
        async for turn in turns:
            text = ""
            for choice, batch in turn:
                frames, last = choices[choice], batch[-1]
                if not last.terminal:
                    text += frames.frames(batch)
                    continue
                text += frames.frames(batch[:-1]) + frames.ending(last)
                left -= 1
                if last.kind != TaskState.COMPLETED:
                    yield text.encode()
                    return
            if not text and silence.due:
                text = choices[0].ping
            if text:
                yield text.encode()
                silence.broken()
            if not left:
                return
            if turn:
                heard_at = time.monotonic()
            silent = time.monotonic() - heard_at > CLOSING_SILENCE_S
            if pod.closed or (pod.closing and not turn and (choices[0].resumable or silent)):
                error = error_object(
                    "This server is going away; the answer was cut.",
                    status=503,
                    code="server_closing",
                )
                yield choices[0].farewell(error).encode()
                return
    except MillstreamError as error:
        told = error_object(error.message, status=500, code=error.code)
        yield choices[0].trouble(told).encode()
    finally:
        if left:
            pod.left(accepted, caller, for_now=choices[0].resumable)


async def client_gone(request: Request) -> None:
    """Return when the client of a request whose body has been read goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
