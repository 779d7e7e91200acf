"""`/tasks`: the native form, made to be left and come back to."""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import JSONResponse, Response

from millstream.api.auth.dependencies import CurrentCaller, TaskReader
from millstream.api.auth.tickets import TICKET_S
from millstream.api.openai import mapping
from millstream.api.openai.schemas import TaskBody
from millstream.api.pod import CurrentPod
from millstream.api.relay import unavailable
from millstream.api.routes.asked import AskedHere
from millstream.api.routes.openapi import json_body
from millstream.api.routes.slots import ReaderSlot
from millstream.api.streams import native_stream
from millstream.shared.connection import RedisError
from millstream.shared.errors import EventOutOfRange
from millstream.shared.keys import Keys
from millstream.shared.schemas import TaskRequest, Usage, shard_of
from millstream.shared.states import Priority, TaskState

router = APIRouter(tags=["tasks"])

_EVENT_ID = re.compile(r"\d{1,15}", re.ASCII)


@router.post("/tasks", status_code=202, openapi_extra=json_body(TaskBody))
async def create_task(asked: AskedHere) -> JSONResponse:
    """Take a task; it runs to its end whether anyone reads or not."""
    body, raw = await asked.read(TaskBody)
    body.require_one_input()
    accepted = await asked.pod.admission.submit(
        TaskRequest(
            body.model or "",
            mapping.messages_of(body.messages or ()),
            body.prompt,
            mapping.sampling_of(
                body, body.max_tokens, logprobs=body.alternatives, early_stop=body.early_stop
            ),
        ),
        caller=asked.caller,
        idempotency_key=asked.idempotency_key,
        route=asked.request.scope["path"],
        body=raw,
        priority=Priority(body.priority) if body.priority else None,
        deadline_s=body.deadline_s,
    )
    task_id, status = accepted.task_id, TaskState.QUEUED
    if accepted.known:
        page = await asked.pod.relay.page(task_id, asked.caller.id, after=0, count=0)
        status = page.state
    answer = {
        "task_id": task_id,
        "status": status,
        "model": accepted.model,
        "queue_position": accepted.position if status == TaskState.QUEUED else None,
        "eta_s": accepted.eta_s if status == TaskState.QUEUED else None,
        "stream_url": f"/tasks/{task_id}/stream",
        "stop_url": f"/tasks/{task_id}/stop",
    }
    return JSONResponse(answer, 202, {**accepted.headers, "Location": f"/tasks/{task_id}"})


@router.get("/tasks/{task_id}")
async def get_task(
    task_id: str,
    pod: CurrentPod,
    caller: CurrentCaller,
) -> dict[str, Any]:
    """How a task stands, with its text so far."""
    log = await pod.relay.so_far(task_id, caller.id)  # also says whose it is
    try:
        fields = await pod.scripts.task_fields(Keys(shard_of(task_id) or 0), task_id)
    except RedisError as error:
        raise unavailable(error) from error
    usage = Usage(int(fields.get("prompt_tokens", 0)), int(fields.get("tokens", 0)))
    body = {} if log.last is None else log.last.body
    return {
        "task_id": task_id,
        "status": log.state,
        "model": fields.get("model"),
        "text": log.text,
        "usage": body.get("usage", usage.to_dict()),
        "finish_reason": body.get("finish_reason"),
        "attempts": int(fields.get("attempt", 0)),
        "worker": fields.get("worker") or None,
        "created_at": _seconds(fields.get("created")),
        "started_at": _seconds(fields.get("started")),
        "finished_at": _seconds(fields.get("finished")),
        "error": body.get("error"),
    }


def _seconds(milliseconds: str | None) -> float | None:
    return None if milliseconds is None else int(milliseconds) / 1000


def event_number(given: str, *, param: str = "last_event_id") -> int:
    """The number that a client gives as the last event it has, in a parameter.

    Raises:
        EventOutOfRange: it is none.
    """
    if not _EVENT_ID.fullmatch(given):
        raise EventOutOfRange(f"{param} must be the number of an event.", param=param)
    return int(given)


@router.get("/tasks/{task_id}/stream", response_model=None)
async def stream_task(
    task_id: str,
    pod: CurrentPod,
    caller: TaskReader,
    slot: ReaderSlot,
    *,
    last_event_id: Annotated[str | None, Query()] = None,
    last_event_id_header: Annotated[str | None, Header(alias="last-event-id")] = None,
) -> Response:
    """A task's events after the one the client has, and then as they come."""
    # A browser that reconnects repeats the first URL and adds the header: the header is newer.
    after = event_number(last_event_id_header or last_event_id or "0")
    page = await pod.relay.resumable(task_id, caller.id, after=after)
    if page is None:
        return Response(status_code=204)
    queued = page.state == TaskState.QUEUED
    await slot.take()
    return native_stream(pod, task_id, caller.id, after=after, model=page.model, queued=queued)


@router.post("/tasks/{task_id}/stop")
@router.delete("/tasks/{task_id}")
async def stop_task(
    task_id: str,
    pod: CurrentPod,
    caller: CurrentCaller,
) -> dict[str, Any]:
    """End a task now; one that has ended stays as it was."""
    state, usage = await pod.stop(task_id, caller.id)
    return {"task_id": task_id, "status": state, "usage": usage.to_dict()}


@router.post("/tasks/{task_id}/ticket", status_code=201)
async def create_ticket(
    task_id: str,
    pod: CurrentPod,
    caller: CurrentCaller,
) -> dict[str, Any]:
    """A ticket that opens one stream of the task, for whoever cannot send headers."""
    ticket = await pod.tickets.issue(task_id, caller)
    return {
        "task_id": task_id,
        "ticket": ticket,
        "expires_in_s": TICKET_S,
        "stream_url": f"/tasks/{task_id}/stream?ticket={ticket}",
    }
