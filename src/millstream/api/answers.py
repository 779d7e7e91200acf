"""Answers on the connection that asked for them, whole or as a stream: who leaves ends the task."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from millstream.api.admission import Accepted
from millstream.api.errors import error_object, failed_task, unfinished
from millstream.api.pod import Pod
from millstream.api.streams import (
    CLOSING_SILENCE_S,
    AnswerFrames,
    Silence,
    answer_stream,
    client_gone,
    event_stream,
)
from millstream.shared.events import TOKEN, Event
from millstream.shared.states import TaskState

# How long a stream's headers wait for the worker's word on the prompt: only a worker can count its
# tokens, and a free one does so in less, so that a prompt beyond the context is an honest 400.
FIRST_WORD_S = 0.15
# The fleet has tried as often as it may; OpenAI's clients would begin all over again.
NO_RETRY = {"x-should-retry": "false"}


async def streamed_answer(
    pod: Pod, accepted: Accepted, caller: str, frames: AnswerFrames
) -> Response:
    """A task's answer as a stream; an error, if its worker refuses it at once."""
    headers = {"x-task-id": accepted.task_id}
    silence = Silence(pod.settings.keepalive_s, pod.settings.keepalive_s)
    events = pod.relay.events(accepted.task_id, caller, after=0, tick_s=silence.tick_s)
    first = await _first_word(pod, accepted, caller, events)
    if first.done() and not first.exception() and (batch := first.result()):
        refused = _refused(batch[0], headers)
        if refused is not None:
            return refused
    return event_stream(
        pod,
        answer_stream(
            pod, accepted, caller, frames=frames, events=_after(first, events), silence=silence
        ),
        headers,
    )


async def _first_word(
    pod: Pod, accepted: Accepted, caller: str, events: AsyncGenerator[list[Event]]
) -> "asyncio.Task[list[Event]]":
    """The next batch, waited for only so long; it may still be under way."""
    deadline = time.monotonic() + FIRST_WORD_S
    try:
        while True:
            first = asyncio.create_task(_next(events))
            await asyncio.wait({first}, timeout=deadline - time.monotonic())
            if not first.done() or first.exception() or first.result():
                return first
    except asyncio.CancelledError:
        pod.left(accepted, caller)
        raise


async def _next(events: AsyncGenerator[list[Event]]) -> list[Event]:
    return await anext(events)


async def _after(
    first: "asyncio.Task[list[Event]]", events: AsyncGenerator[list[Event]]
) -> AsyncIterator[list[Event]]:
    """The batch that is under way already, then the rest; closes the events with itself."""
    try:
        yield await first
        async for batch in events:
            yield batch
    finally:
        if not first.done():
            first.cancel()
            await asyncio.wait({first})
        await events.aclose()


def _refused(event: Event, headers: dict[str, str]) -> Response | None:
    """The answer to a task that a worker refused before its first token."""
    if event.kind != TaskState.FAILED:
        return None
    status, body = failed_task(event.body["error"])
    return JSONResponse(body, status, {**headers, **NO_RETRY})


async def whole_answer(
    request: Request,
    pod: Pod,
    accepted: Accepted,
    caller: str,
    body_of: Callable[[str, Event], dict[str, Any]],
) -> Response:
    """A task's answer in one piece: `body_of` its text and its last event."""
    tick_s = pod.settings.keepalive_s
    events = pod.relay.events(accepted.task_id, caller, after=0, tick_s=tick_s)
    collecting = asyncio.create_task(_collect(pod, events))
    gone = asyncio.create_task(client_gone(request))
    try:
        await asyncio.wait({collecting, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            pod.left(accepted, caller)
            return Response(status_code=499)  # nobody reads it
    except asyncio.CancelledError:
        pod.left(accepted, caller)
        raise
    finally:
        gone.cancel()
        if not collecting.done():
            collecting.cancel()
    text, last = collecting.result()
    headers = {"x-task-id": accepted.task_id}
    if last is None:
        pod.left(accepted, caller)
        error = error_object("This server is going away.", status=503, code="server_closing")
        return JSONResponse(error, 503, {**headers, "Retry-After": "1"})
    if last.kind == TaskState.COMPLETED:
        return JSONResponse(body_of(text, last), headers=headers)
    if last.kind == TaskState.CANCELLED:
        return JSONResponse(unfinished(last), 409, headers)
    status, body = failed_task(last.body["error"])
    return JSONResponse(body, status, {**headers, **NO_RETRY})


async def _collect(pod: Pod, events: AsyncGenerator[list[Event]]) -> tuple[str, Event | None]:
    """All text and the last event; None when the pod closes first."""
    texts: list[str] = []
    heard_at = time.monotonic()
    async for batch in events:
        texts += [event.text for event in batch if event.kind == TOKEN]
        if batch and batch[-1].terminal:
            return "".join(texts), batch[-1]
        if batch:
            heard_at = time.monotonic()
        elif pod.closed or (pod.closing and time.monotonic() - heard_at > CLOSING_SILENCE_S):
            break
    return "", None
