"""Answers on the connection that asked for them, whole or as a stream: who leaves ends the task."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from millstream.api.admission import Accepted
from millstream.api.choices import Told, Turn, turns_of
from millstream.api.errors import error_object, failed_task, unfinished
from millstream.api.event_stream import EventStream, Shortcut
from millstream.api.pod import Pod
from millstream.api.silence import Silence
from millstream.api.streams import CLOSING_SILENCE_S, AnswerFrames, answer_stream, client_gone
from millstream.shared.cancellation import cancel_until_done
from millstream.shared.errors import MillstreamError
from millstream.shared.events import TOKEN, Event
from millstream.shared.states import TaskState

# How long a stream's headers wait for the worker's word on the prompt: only a worker can count its
# tokens, and a free one does so in less, so that a prompt beyond the context is an honest 400.
FIRST_WORD_S = 0.15
# The fleet has tried as often as it may; OpenAI's clients would begin all over again.
NO_RETRY = {"x-should-retry": "false"}


def followed_answer(
    pod: Pod, reader: Accepted, caller: str, frames: AnswerFrames, *, after: int = 0
) -> Response:
    """The stream of a task that is there, after an event, for one of its readers."""
    silence = _silence(pod)
    shortcut = Shortcut(frames.frames, silence)
    turns = _turns(pod, reader, caller, silence, [shortcut], after=after)
    content = answer_stream(pod, reader, caller, choices=[frames], turns=turns, silence=silence)
    return _event_stream(pod, content, [shortcut], reader.headers)


def streamed_answer(pod: Pod, accepted: Accepted, caller: str, *choices: AnswerFrames) -> Response:
    """An answer as a stream, a task a choice; an error, if a worker refuses it at once."""
    silence = _silence(pod)
    shortcuts = [Shortcut(frames.frames, silence) for frames in choices]
    turns = _turns(pod, accepted, caller, silence, shortcuts)
    first = _FirstWord(pod, accepted, caller, turns)
    content = answer_stream(
        pod, accepted, caller, choices=choices, turns=first.and_the_rest(), silence=silence
    )
    return _event_stream(pod, content, shortcuts, accepted.headers, refusal=first.refusal)


def _silence(pod: Pod) -> Silence:
    return Silence(pod.settings.keepalive_s, pod.settings.keepalive_s)


def _event_stream(
    pod: Pod,
    content: AsyncGenerator[bytes],
    shortcuts: Sequence[Shortcut],
    headers: dict[str, str],
    refusal: Callable[[], Awaitable[Response | None]] | None = None,
) -> EventStream:
    timeout_s = pod.settings.send_timeout_s
    return EventStream(
        content, *shortcuts, send_timeout_s=timeout_s, headers=headers, refusal=refusal
    )


def _turns(
    pod: Pod,
    accepted: Accepted,
    caller: str,
    silence: Silence,
    shortcuts: Sequence[Shortcut | None],
    *,
    after: int = 0,
) -> AsyncGenerator[Turn]:
    """What the answer's choices bring, but for what goes by their shortcuts."""
    return turns_of(
        [
            pod.relay.events(
                task_id,
                caller,
                after=after,
                silence=silence,
                shortcut=shortcut,
                expected=not accepted.known,
            )
            for task_id, shortcut in zip(accepted.task_ids, shortcuts, strict=True)
        ]
    )


class _FirstWord:
    """The first turn of an answer, waited for before its headers are sent, but only so long.

    The response waits and not the route: what FastAPI does once a route has returned is done by
    the time the first token comes.
    """

    def __init__(
        self, pod: Pod, accepted: Accepted, caller: str, turns: AsyncGenerator[Turn]
    ) -> None:
        self._pod = pod
        self._accepted = accepted
        self._caller = caller
        self._turns = turns
        self._turn: asyncio.Task[Turn] | None = None

    async def refusal(self) -> Response | None:
        """What is answered in place of the stream, if a worker refuses the task in time.

        Raises:
            MillstreamError: the answer cannot be had, such as that of a task that has expired.
        """
        pod, accepted, caller = self._pod, self._accepted, self._caller
        deadline = time.monotonic() + FIRST_WORD_S
        try:
            while True:
                self._turn = turn = asyncio.create_task(_next(self._turns))
                await asyncio.wait({turn}, timeout=deadline - time.monotonic())
                if not turn.done() or turn.exception() or turn.result():
                    break
        except asyncio.CancelledError:
            pod.left(accepted, caller)
            raise
        if not turn.done():
            return None
        if (error := turn.exception()) is not None:
            if not isinstance(error, MillstreamError):
                return None  # the stream is cut
            pod.left(accepted, caller)
            raise error
        for _, batch in turn.result():
            if batch[0].kind == TaskState.FAILED:
                await self._turns.aclose()
                pod.left(accepted, caller)  # the other choices
                status, body = failed_task(batch[0].body["error"])
                return JSONResponse(body, status, {**accepted.headers, **NO_RETRY})
        return None

    async def and_the_rest(self) -> AsyncIterator[Turn]:
        """All turns, beginning with that one, which may be under way; closes them with itself."""
        try:
            if self._turn is not None:
                yield await self._turn
            async for turn in self._turns:
                yield turn
        finally:
            if self._turn is not None:
                await cancel_until_done([self._turn])
            await self._turns.aclose()


async def _next(turns: AsyncGenerator[Turn]) -> Turn:
    return await anext(turns)


async def whole_answer(
    request: Request,
    pod: Pod,
    accepted: Accepted,
    caller: str,
    body_of: Callable[..., dict[str, Any]],
) -> Response:
    """An answer in one piece: `body_of(*choices)`, a `Told` each."""
    no_shortcuts = [None] * len(accepted.task_ids)
    turns = _turns(pod, accepted, caller, _silence(pod), no_shortcuts)
    collecting = asyncio.create_task(_collect(pod, accepted, turns))
    gone = asyncio.create_task(client_gone(request))
    try:
        await asyncio.wait({collecting, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            pod.left(accepted, caller)
            # Read by nobody, or by one who said all there was to say and listens on.
            message = "The client left before the answer."
            error = error_object(message, status=499, code="client_left")
            return JSONResponse(error, 499, accepted.headers)
    except asyncio.CancelledError:
        pod.left(accepted, caller)
        raise
    finally:
        await cancel_until_done([gone, collecting])
    told = collecting.result()
    headers = accepted.headers
    if isinstance(told, list):
        return JSONResponse(body_of(*told), headers=headers)
    pod.left(accepted, caller)
    if told is None:
        error = error_object("This server is going away.", status=503, code="server_closing")
        return JSONResponse(error, 503, {**headers, "Retry-After": "1"})
    if told.kind == TaskState.CANCELLED:
        return JSONResponse(unfinished(told), 409, headers)
    status, body = failed_task(told.body["error"])
    return JSONResponse(body, status, {**headers, **NO_RETRY})


async def _collect(
    pod: Pod, accepted: Accepted, turns: AsyncGenerator[Turn]
) -> list[Told] | Event | None:
    """All choices, or the end of the first that was not completed; None: the pod closes first."""
    tokens: list[list[Event]] = [[] for _ in accepted.task_ids]
    ends: dict[int, Event] = {}
    heard_at = time.monotonic()
    async with aclosing(turns):
        async for turn in turns:
            for choice, batch in turn:
                tokens[choice] += [event for event in batch if event.kind == TOKEN]
                if batch[-1].terminal:
                    ends[choice] = batch[-1]
                    if batch[-1].kind != TaskState.COMPLETED:
                        return batch[-1]
            if len(ends) == len(tokens):
                return [Told(told, ends[choice]) for choice, told in enumerate(tokens)]
            if turn:
                heard_at = time.monotonic()
            silent = time.monotonic() - heard_at > CLOSING_SILENCE_S
            if pod.closed or (pod.closing and silent):
                break
    return None
