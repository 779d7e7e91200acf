"""`/v1/responses`: OpenAI's Responses, made to be left and come back to where they are stored."""

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from millstream.api import responses as stored_responses
from millstream.api.admission import Accepted
from millstream.api.answers import followed_answer, streamed_answer, whole_answer
from millstream.api.auth.dependencies import CurrentCaller
from millstream.api.body import read_query
from millstream.api.choices import Told
from millstream.api.openai import mapping
from millstream.api.openai.response_events import Numbering, ResponseFrames
from millstream.api.openai.response_object import response_object
from millstream.api.openai.response_request import (
    items_page,
    messages_of,
    options_of,
    references_of,
)
from millstream.api.openai.response_schemas import (
    InputItemsQuery,
    ResponseRequest,
    RetrieveQuery,
)
from millstream.api.pod import CurrentPod
from millstream.api.routes.asked import AskedHere
from millstream.api.routes.openapi import json_body, query_parameters
from millstream.api.routes.slots import StreamSlot
from millstream.api.routes.tasks import event_number
from millstream.shared.errors import EventOutOfRange, ExpiredTask, InvalidRequest, UnknownTask
from millstream.shared.schemas import Message, TaskRequest
from millstream.shared.states import TaskState

router = APIRouter(tags=["openai"])


@router.post("/v1/responses", response_model=None, openapi_extra=json_body(ResponseRequest))
async def create_response(asked: AskedHere) -> Response:
    """An answer, whole, as a stream, or in the background."""
    pod, caller = asked.pod, asked.caller
    body, raw = await asked.read(ResponseRequest)
    options = options_of(body, int(time.time()))
    if options.background and not options.store:
        raise InvalidRequest("background needs store: true.", param="background")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    earlier: tuple[Message, ...] = ()
    if body.previous_response_id is not None:
        earlier = await stored_responses.turns_before(pod, body.previous_response_id, caller.id)
    items = await stored_responses.items(pod, references_of(body), caller.id)
    task = TaskRequest(
        body.model or "",
        messages_of(body, earlier, items),
        sampling=mapping.sampling_of(body, body.max_output_tokens),
        response=options,
    )
    accepted = await asked.submit(
        task,
        body=raw,
        stream=bool(body.stream),
        key=asked.idempotency_key,
        lasting=options.background,
        service_tier=body.service_tier,
    )
    task_id = accepted.task_id
    (task,) = accepted.requests
    if accepted.known:
        try:
            task = await stored_responses.request_of(pod, task_id, caller.id)
        except UnknownTask as error:
            raise ExpiredTask(
                "The response that this Idempotency-Key made was deleted; take another key.",
                param="Idempotency-Key",
                code="response_deleted",
            ) from error
    if options.background and not body.stream:
        answer = await stored_responses.as_it_stands(pod, task_id, task, caller.id)
        return JSONResponse(answer, headers=accepted.headers)
    if body.stream:
        frames = ResponseFrames(task_id, task, attached=accepted.attached)
        if options.background:
            return followed_answer(pod, accepted, caller.id, frames)
        return streamed_answer(pod, accepted, caller.id, frames)

    def completed(told: Told) -> dict[str, Any]:
        state = TaskState.COMPLETED
        return response_object(task_id, task, state=state, text=told.text, last=told.end)

    return await whole_answer(asked.request, pod, accepted, caller.id, completed)


@router.get(
    "/v1/responses/{response_id}",
    response_model=None,
    openapi_extra=query_parameters(RetrieveQuery),
)
async def get_response(
    response_id: str, request: Request, pod: CurrentPod, caller: CurrentCaller, slot: StreamSlot
) -> Response:
    """A response as it stands, or its events after a number and then as they come."""
    query = read_query(request, RetrieveQuery)
    if query.starting_after is not None and not query.stream:
        raise InvalidRequest("starting_after needs stream=true.", param="starting_after")
    after = -1  # nothing seen: the first number is 0
    if query.starting_after is not None:
        after = event_number(query.starting_after, param="starting_after")
    stored = await stored_responses.find(pod, response_id, caller.id)
    task_id = stored.task_id
    if not query.stream:
        return JSONResponse(
            await stored_responses.as_it_stands(pod, task_id, stored.request, caller.id)
        )
    numbering = Numbering(stored.request)
    page = await pod.relay.page(task_id, caller.id, after=numbering.seen(after), count=1)
    if after > (last := numbering.last(page)):
        raise EventOutOfRange(
            f"The stream has come to {last}; {after} is ahead of it.", param="starting_after"
        )
    await slot.take()
    reader = Accepted((task_id,), page.model, known=True, position=0, eta_s=0, attached=False)
    return followed_answer(
        pod, reader, caller.id, ResponseFrames(task_id, stored.request, after=after)
    )


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(
    response_id: str, pod: CurrentPod, caller: CurrentCaller
) -> dict[str, Any]:
    """End a background response now; one that has ended stays as it was."""
    stored = await stored_responses.find(pod, response_id, caller.id)
    if not stored.options.background:
        raise InvalidRequest(
            "Only a response with background: true can be cancelled.", param="response_id"
        )
    await pod.stop(stored.task_id, caller.id)
    return await stored_responses.as_it_stands(pod, stored.task_id, stored.request, caller.id)


@router.delete("/v1/responses/{response_id}")
async def delete_response(
    response_id: str, pod: CurrentPod, caller: CurrentCaller
) -> dict[str, Any]:
    """End a response and forget it."""
    stored = await stored_responses.find(pod, response_id, caller.id)
    await stored_responses.delete(pod, stored, caller.id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get(
    "/v1/responses/{response_id}/input_items", openapi_extra=query_parameters(InputItemsQuery)
)
async def list_input_items(
    response_id: str, request: Request, pod: CurrentPod, caller: CurrentCaller
) -> dict[str, Any]:
    """What a response answers: its input, after the turns before it."""
    query = read_query(request, InputItemsQuery)
    stored = await stored_responses.find(pod, response_id, caller.id)
    return items_page(stored.task_id, stored.request, query)
