"""The event streams: what a reader of a task is sent, from the first comment to the last event."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request

from millstream.api import sse
from millstream.api.admission import Accepted
from millstream.api.choices import Turn
from millstream.api.errors import error_object
from millstream.api.event_stream import EventStream, Shortcut, Unfinished
from millstream.api.pod import Pod
from millstream.api.silence import Silence
from millstream.api.wire import WIRE, Wire
from millstream.shared.connection import RedisError
from millstream.shared.errors import MillstreamError
from millstream.shared.events import Event
from millstream.shared.states import TaskState

logger = logging.getLogger(__name__)

HINT_S, FAR_HINT_S = 2.0, 10.0
NEAR = 100
"""The last place in the queue that is told as often as the first."""
RETRY_MS = 500
# A pod that is told to go lets answers finish; one that stands still will not in its time.
CLOSING_SILENCE_S = 5.0

QueuePlace = tuple[int, float | None]
"""Place in the queue from 1, and seconds until it is served, if that is known."""


async def news_of(
    pod: Pod,
    task_id: str,
    caller: str,
    *,
    after: int,
    model: str,
    queued: bool,
    silence: Silence,
    shortcut: Shortcut | None = None,
) -> AsyncGenerator[list[Event] | QueuePlace]:
    """What the reader of a task is told after an event, up to the last one.

    Yields batches of events, empty ones to look up; and the task's place in the queue, whenever
    that has changed. Ends early when the pod closes. Raises as `Relay.events`.
    """
    last_place: QueuePlace | None = None
    events = pod.relay.events(task_id, caller, after=after, silence=silence, shortcut=shortcut)
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
                    # Who is far back is told less often, or 10,000 of them would take half a core.
                    silence.tick(HINT_S if place[0] <= NEAR else FAR_HINT_S)
                    yield place
                    continue
            yield batch


def native_stream(
    pod: Pod, task_id: str, caller: str, *, after: int, model: str, queued: bool
) -> EventStream:
    """The native stream of a task after event number `after`."""
    silence = Silence(pod.settings.keepalive_s, HINT_S)
    shortcut = Shortcut(_native_frames, silence)
    news = news_of(
        pod, task_id, caller, after=after, model=model, queued=queued, silence=silence,
        shortcut=shortcut,
    )  # fmt: skip
    content = _native_content(pod, news, silence)
    return EventStream(content, shortcut, send_timeout_s=pod.settings.send_timeout_s)


def _native_frames(events: Sequence[Event]) -> str:
    return "".join(map(sse.native_frame, events))


async def _native_content(
    pod: Pod, news: AsyncGenerator[list[Event] | QueuePlace], silence: Silence
) -> AsyncGenerator[bytes]:
    yield sse.OPENING.encode()
    ended = False
    async with aclosing(news):
        try:
            async for told in news:
                if isinstance(told, tuple):
                    frames = sse.queued_frame(*told)
                else:
                    frames = _native_frames(told)
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

    def farewell(self, error: dict[str, Any]) -> str | None:
        """The last words of a pod that goes before the answer has ended; None: a cut says it."""
        ...


async def answer_stream(
    pod: Pod,
    accepted: Accepted,
    caller: str,
    *,
    choices: Sequence[AnswerFrames],
    turns: AsyncIterator[Turn],
    silence: Silence,
) -> AsyncGenerator[bytes]:
    """The stream of an answer. A client that goes away ends its tasks, at once or later.

    A choice that was stopped or has failed ends all: the answer cannot be finished any more.

    Raises:
        Unfinished: the pod goes, and this form has no words for it.
    """
    left = len(choices)
    try:
        yield (sse.OPENING + "".join(frames.opening() for frames in choices)).encode()
        async for turn in turns:
            text, over = "", False
            for choice, batch in turn:
                frames, last = choices[choice], batch[-1]
                if not last.terminal:
                    text += frames.frames(batch)
                    continue
                text += frames.frames(batch[:-1]) + frames.ending(last)
                left -= 1
                over = last.kind != TaskState.COMPLETED or not left
                if over:
                    break
            if not text and silence.due:
                text = choices[0].ping
            if text:
                yield text.encode()
                silence.broken()
            if over:
                return
            if turn:
                silence.heard()
            silent = time.monotonic() - silence.heard_at > CLOSING_SILENCE_S
            if pod.closed or (pod.closing and not turn and (choices[0].resumable or silent)):
                yield _farewell(choices[0]).encode()
                return
    except MillstreamError as error:
        told = error_object(error.message, status=500, code=error.code)
        yield choices[0].trouble(told).encode()
    finally:
        if left:
            pod.left(accepted, caller, for_now=choices[0].resumable)


def _farewell(frames: AnswerFrames) -> str:
    error = error_object(
        "This server is going away; the answer was cut.", status=503, code="server_closing"
    )
    if (farewell := frames.farewell(error)) is None:
        raise Unfinished
    return farewell


async def client_gone(request: Request) -> None:
    """Return when the client of a request whose body has been read goes away."""
    wire: Wire | None = request.scope.get("extensions", {}).get(WIRE)
    if wire is None:  # another server than ours
        while (await request.receive())["type"] != "http.disconnect":
            pass
        return
    gone = asyncio.Event()
    wire.watch(gone.set)
    await gone.wait()
