"""`POST /v1/chat/completions`."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from millstream.api.admission import Accepted
from millstream.api.auth.dependencies import CurrentCaller
from millstream.api.body import largest_body, read_body
from millstream.api.errors import error_object, failed_task
from millstream.api.openai import mapping
from millstream.api.openai.schemas import ChatCompletionRequest
from millstream.api.pod import CurrentPod, Pod
from millstream.api.routes.openapi import json_body
from millstream.api.streams import (
    CLOSING_SILENCE_S,
    Silence,
    chat_stream,
    client_gone,
    event_stream,
)
from millstream.shared.errors import InvalidRequest
from millstream.shared.events import TOKEN, Event
from millstream.shared.states import TaskState

router = APIRouter(tags=["openai"])

# How long a stream's headers wait for the worker's word on the prompt: only a worker can count its
# tokens, and a free one does so in less, so that a prompt beyond the context is an honest 400.
FIRST_WORD_S = 0.15
# The fleet has tried as often as it may; OpenAI's clients would begin all over again.
NO_RETRY = {"x-should-retry": "false"}


@router.post(
    "/v1/chat/completions",
    response_model=None,
    openapi_extra=json_body(ChatCompletionRequest),
)
async def create_chat_completion(
    request: Request,
    pod: CurrentPod,
    caller: CurrentCaller,
) -> Response:
    """An answer to a conversation, whole or as a stream."""
    limit = largest_body(pod.settings.max_prompt_chars)
    body, raw = await read_body(request, ChatCompletionRequest, most=limit)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    key = request.headers.get("idempotency-key")
    accepted = await pod.admission.submit(
        caller=caller,
        model=body.model,
        sampling=mapping.sampling_of(body, mapping.chat_max_tokens(body)),
        messages=mapping.messages_of(body.messages),
        idempotency_key=key,
        body=raw,
        # Who sends a key means to come back for the answer: it is not bound to this connection.
        attached=key is None,
    )
    task_id, created = accepted.task_id, int(time.time())
    headers = {"x-task-id": task_id}
    silence = Silence(pod.settings.keepalive_s, pod.settings.keepalive_s)
    events = pod.relay.events(task_id, caller.id, after=0, tick_s=silence.tick_s)
    if not body.stream:
        return await _whole(request, pod, accepted, caller.id, events)

    first = await _first_word(pod, accepted, caller.id, events)
    if first.done() and not first.exception() and (batch := first.result()):
        refused = _refused(batch[0])
        if refused is not None:
            return refused
    options = body.stream_options
    chunks = mapping.ChatChunks(
        task_id,
        model=accepted.model,
        created=created,
        include_usage=bool(options and options.include_usage),
    )
    return event_stream(
        pod,
        chat_stream(
            pod, accepted, caller.id, chunks=chunks, events=_after(first, events), silence=silence
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


def _refused(event: Event) -> Response | None:
    """The answer to a task that a worker refused before its first token."""
    if event.kind != TaskState.FAILED:
        return None
    status, body = failed_task(event.body["error"])
    return JSONResponse(body, status, NO_RETRY)


async def _whole(
    request: Request,
    pod: Pod,
    accepted: Accepted,
    caller: str,
    events: AsyncGenerator[list[Event]],
) -> Response:
    """The answer in one piece; the client going away stops the task."""
    task_id, created = accepted.task_id, int(time.time())
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
    headers = {"x-task-id": task_id}
    if last is None:
        pod.left(accepted, caller)
        error = error_object("This server is going away.", status=503, code="server_closing")
        return JSONResponse(error, 503, {**headers, "Retry-After": "1"})
    if last.kind == TaskState.COMPLETED:
        answer: dict[str, Any] = mapping.chat_completion(
            task_id, model=accepted.model, created=created, text=text, body=last.body
        )
        return JSONResponse(answer, headers=headers)
    if last.kind == TaskState.CANCELLED:
        return JSONResponse(mapping.unfinished(last), 409, headers)
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
