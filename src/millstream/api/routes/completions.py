"""`POST /v1/completions`."""

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from millstream.api.answers import streamed_answer, whole_answer
from millstream.api.auth.dependencies import CurrentCaller
from millstream.api.body import largest_body, read_body
from millstream.api.choices import Told
from millstream.api.openai import mapping
from millstream.api.openai.completion_schemas import CompletionRequest
from millstream.api.openai.completions import Completion, CompletionChoice
from millstream.api.pod import CurrentPod
from millstream.api.routes.openapi import json_body
from millstream.api.routes.slots import StreamSlot

router = APIRouter(tags=["openai"])


@router.post(
    "/v1/completions",
    response_model=None,
    openapi_extra=json_body(CompletionRequest),
)
async def create_completion(
    request: Request,
    pod: CurrentPod,
    caller: CurrentCaller,
    slot: StreamSlot,
) -> Response:
    """How texts go on, whole or as a stream."""
    limit = largest_body(pod.settings.max_prompt_chars)
    body, raw = await read_body(request, CompletionRequest, most=limit)
    body.check_together()
    tasks = mapping.completion_tasks(body)
    if body.stream:
        await slot.take()
    key = request.headers.get("idempotency-key")
    accepted = await pod.admission.submit(
        *tasks,
        caller=caller,
        idempotency_key=key,
        body=raw,
        # Who sends a key means to come back for the answer: it is not bound to this connection.
        attached=key is None,
    )
    options, sampling = body.stream_options, tasks[0].sampling
    completion = Completion(
        accepted.task_id,
        model=accepted.model,
        created=int(time.time()),
        prompts=len(body.prompts),
        choices=len(tasks),
        include_usage=bool(options and options.include_usage),
    )
    if not body.stream:

        def whole(*choices: Told) -> dict[str, Any]:
            return completion.whole(choices, sampling)

        return await whole_answer(request, pod, accepted, caller.id, whole)
    choices = [CompletionChoice(completion, index, sampling) for index in range(len(tasks))]
    return await streamed_answer(pod, accepted, caller.id, *choices)
