"""`/chat` and `/generate`: the simple forms of the tutorials, also for a browser's EventSource."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import Response

from millstream.api.admission import Accepted
from millstream.api.answers import followed_answer, streamed_answer, whole_answer
from millstream.api.auth.dependencies import CurrentCaller
from millstream.api.body import read_query
from millstream.api.choices import Told
from millstream.api.openai import mapping
from millstream.api.pod import CurrentPod
from millstream.api.routes.asked import Asked, AskedHere
from millstream.api.routes.openapi import json_body, query_parameters
from millstream.api.simple.frames import SimpleFrames, parse_event_id
from millstream.api.simple.schemas import SimpleBody, SimpleQuery
from millstream.shared.errors import InvalidRequest
from millstream.shared.schemas import Message, TaskRequest

router = APIRouter(tags=["simple"])

_BODY = json_body(SimpleBody)
_QUERY = query_parameters(SimpleQuery)


class SimplyAsked(Asked, frozen=True):
    """A request that may be of a reader who comes back."""

    last_event_id: str | None


async def simply_asked(
    asked: AskedHere, last_event_id: Annotated[str | None, Header()] = None
) -> SimplyAsked:
    """What a route of this form is given (a FastAPI dependency)."""
    return SimplyAsked(asked.request, asked.pod, asked.caller, asked.slot, last_event_id)


AskedSimply = Annotated[SimplyAsked, Depends(simply_asked)]


@router.post("/chat", response_model=None, openapi_extra=_BODY)
async def chat(asked: AskedSimply) -> Response:
    """The model's answer to a message or a conversation; a stream unless told otherwise."""
    return await _answer(asked, chat=True, stream=True)


@router.post("/generate", response_model=None, openapi_extra=_BODY)
async def generate(asked: AskedSimply) -> Response:
    """What follows a prompt; whole unless told otherwise."""
    return await _answer(asked, chat=False, stream=False)


@router.post("/generate/stream", response_model=None, openapi_extra=_BODY)
async def generate_stream(asked: AskedSimply) -> Response:
    """What follows a prompt, as a stream."""
    return await _answer(asked, chat=False, stream=True, always=True)


@router.get("/chat", response_model=None, openapi_extra=_QUERY)
async def chat_events(asked: AskedSimply) -> Response:
    """The stream of `POST /chat` for an EventSource."""
    return await _event_source(asked, chat=True)


@router.get("/generate/stream", response_model=None, openapi_extra=_QUERY)
async def generate_events(asked: AskedSimply) -> Response:
    """The stream of `POST /generate/stream` for an EventSource."""
    return await _event_source(asked, chat=False)


@router.post("/generate/stream/{task_id}/stop")
async def stop_generation(task_id: str, pod: CurrentPod, caller: CurrentCaller) -> dict[str, Any]:
    """End a task now; one that has ended stays as it was."""
    state, usage = await pod.stop(task_id, caller.id)
    return {"task_id": task_id, "status": state, "usage": usage.to_dict()}


async def _answer(
    asked: SimplyAsked, *, chat: bool, stream: bool, always: bool = False
) -> Response:
    pod, caller = asked.pod, asked.caller
    body, raw = await asked.read(SimpleBody)
    body.require_one_input()
    if always and body.stream is False:
        raise InvalidRequest("This path always streams; use /generate.", param="stream")
    stream = stream if body.stream is None else body.stream
    if stream and asked.last_event_id:  # a library that repeats its POST after a cut
        return await _resume(asked, asked.last_event_id)
    key, messages = asked.idempotency_key, mapping.messages_of(body.messages or ())
    accepted = await _submit(asked, body, messages, chat=chat, stream=stream, key=key, raw=raw)
    if stream:
        return streamed_answer(pod, accepted, caller.id, SimpleFrames(accepted.task_id))

    def whole(told: Told) -> dict[str, Any]:
        return {
            "task_id": accepted.task_id,
            "model": accepted.model,
            "text": told.text,
            **told.end.body,
        }

    return await whole_answer(asked.request, pod, accepted, caller.id, whole)


async def _event_source(asked: SimplyAsked, *, chat: bool) -> Response:
    _require_script(asked.request)
    if asked.last_event_id:
        return await _resume(asked, asked.last_event_id)
    query, raw = read_query(asked.request, SimpleQuery), asked.request.scope["query_string"]
    key = query.idempotency_key
    accepted = await _submit(asked, query, chat=chat, stream=True, key=key, raw=raw)
    frames = SimpleFrames(accepted.task_id, resumable=True)
    return streamed_answer(asked.pod, accepted, asked.caller.id, frames)


def _require_script(request: Request) -> None:
    """Refuse what a browser sends by itself: this GET makes a task.

    An address typed in, a prefetch, `<img src>` and a crawler do not ask for an event stream. A
    foreign page's `fetch` may say that it does, but only in a mode that the browser names.
    """
    accept = request.headers.get("accept", "")
    if "text/event-stream" not in accept.lower():
        raise InvalidRequest(
            "This address is for EventSource: send Accept: text/event-stream.", param="Accept"
        )
    mode = request.headers.get("sec-fetch-mode", "cors")
    if mode not in ("cors", "same-origin"):
        raise InvalidRequest(
            f"This address is not for requests of mode {mode[:20]!r}.", param="Sec-Fetch-Mode"
        )


async def _resume(asked: SimplyAsked, last_event_id: str) -> Response:
    task_id, after = parse_event_id(last_event_id)
    page = await asked.pod.relay.resumable(task_id, asked.caller.id, after=after)
    if page is None:
        return Response(status_code=204)  # EventSource gives up, which is what it should do
    await asked.slot.take()
    # Whether the task ends with its readers is the task's affair (`stop`): it may be a native one.
    reader = Accepted((task_id,), page.model, known=True, position=0, eta_s=0, attached=True)
    frames = SimpleFrames(task_id, after=after, resumable=True)
    return followed_answer(asked.pod, reader, asked.caller.id, frames, after=after)


async def _submit(
    asked: SimplyAsked,
    body: SimpleBody | SimpleQuery,
    messages: tuple[Message, ...] = (),
    *,
    chat: bool,
    stream: bool,
    key: str | None,
    raw: bytes,
) -> Accepted:
    sampling, prompt = mapping.sampling_of(body, body.max_new_tokens), body.prompt
    if chat and prompt is not None:
        messages, prompt = (Message("user", prompt),), None
    try:
        task = TaskRequest(body.model or "", messages, prompt, sampling)
        return await asked.submit(task, body=raw, stream=stream, key=key)
    except InvalidRequest as error:  # by the names it has here
        if error.param == "max_tokens":
            error.param = "max_new_tokens"
        elif error.param == "messages" and body.prompt is not None:
            error.param = "prompt"
        raise
