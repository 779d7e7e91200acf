"""`POST /v1/chat/completions`."""

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from millstream.api.answers import streamed_answer, whole_answer
from millstream.api.auth.dependencies import CurrentCaller
from millstream.api.body import largest_body, read_body
from millstream.api.choices import Told
from millstream.api.openai import mapping
from millstream.api.openai.chat import ChatChoice, ChatChunks, chat_completion
from millstream.api.openai.schemas import ChatCompletionRequest
from millstream.api.pod import CurrentPod
from millstream.api.routes.openapi import json_body
from millstream.api.routes.slots import StreamSlot
from millstream.shared.errors import InvalidRequest

router = APIRouter(tags=["openai"])


@router.post(
    "/v1/chat/completions",
    response_model=None,
    openapi_extra=json_body(ChatCompletionRequest),
)
async def create_chat_completion(
    request: Request,
    pod: CurrentPod,
    caller: CurrentCaller,
    slot: StreamSlot,
) -> Response:
    """An answer to a conversation, whole or as a stream."""
    limit = largest_body(pod.settings.max_prompt_chars)
    body, raw = await read_body(request, ChatCompletionRequest, most=limit)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    tasks = mapping.chat_tasks(body)
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
        priority=mapping.priority_of(body.service_tier),
    )
    task_id, model, created = accepted.task_id, accepted.model, int(time.time())
    if not body.stream:

        def completion(*choices: Told) -> dict[str, Any]:
            return chat_completion(
                task_id,
                model=model,
                created=created,
                choices=choices,
                logprobs=body.alternatives is not None,
            )

        return await whole_answer(request, pod, accepted, caller.id, completion)
    options = body.stream_options
    chunks = ChatChunks(
        task_id,
        model=model,
        created=created,
        choices=len(tasks),
        include_usage=bool(options and options.include_usage),
    )
    choices = [ChatChoice(chunks, index, task.sampling) for index, task in enumerate(tasks)]
    return await streamed_answer(pod, accepted, caller.id, *choices)
