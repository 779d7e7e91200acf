"""`POST /v1/completions`."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from millstream.api.answers import streamed_answer, whole_answer
from millstream.api.choices import Told
from millstream.api.openai import mapping
from millstream.api.openai.completion_schemas import CompletionRequest
from millstream.api.openai.completions import Completion, CompletionChoice
from millstream.api.routes.asked import AskedHere
from millstream.api.routes.openapi import json_body

router = APIRouter(tags=["openai"])


@router.post(
    "/v1/completions",
    response_model=None,
    openapi_extra=json_body(CompletionRequest),
)
async def create_completion(asked: AskedHere) -> Response:
    """How texts go on, whole or as a stream."""
    body, raw = await asked.read(CompletionRequest)
    body.check_together()
    tasks = mapping.completion_tasks(body)
    accepted = await asked.submit(
        *tasks,
        body=raw,
        stream=bool(body.stream),
        key=asked.idempotency_key,
        service_tier=body.service_tier,
    )
    options, sampling = body.stream_options, tasks[0].sampling
    completion = Completion(
        accepted.task_id,
        model=accepted.model,
        created=accepted.created,
        prompts=len(body.prompts),
        choices=len(tasks),
        include_usage=bool(options and options.include_usage),
    )
    if not body.stream:

        def whole(*choices: Told) -> dict[str, Any]:
            return completion.whole(choices, sampling)

        return await whole_answer(asked.request, asked.pod, accepted, asked.caller.id, whole)
    choices = [CompletionChoice(completion, index, sampling) for index in range(len(tasks))]
    return streamed_answer(asked.pod, accepted, asked.caller.id, *choices)
