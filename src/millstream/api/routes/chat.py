"""`POST /v1/chat/completions`."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from millstream.api.answers import streamed_answer, whole_answer
from millstream.api.choices import Told
from millstream.api.openai import mapping
from millstream.api.openai.chat import ChatChoice, ChatChunks, chat_completion
from millstream.api.openai.schemas import ChatCompletionRequest
from millstream.api.routes.asked import AskedHere
from millstream.api.routes.openapi import json_body
from millstream.shared.errors import InvalidRequest

router = APIRouter(tags=["openai"])


@router.post(
    "/v1/chat/completions",
    response_model=None,
    openapi_extra=json_body(ChatCompletionRequest),
)
async def create_chat_completion(asked: AskedHere) -> Response:
    """An answer to a conversation, whole or as a stream."""
    body, raw = await asked.read(ChatCompletionRequest)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    tasks = mapping.chat_tasks(body)
    try:
        accepted = await asked.submit(
            *tasks,
            body=raw,
            stream=bool(body.stream),
            key=asked.idempotency_key,
            service_tier=body.service_tier,
        )
    except InvalidRequest as error:
        if error.param == "max_tokens" and body.max_tokens is None:  # by its newer name
            error.param = "max_completion_tokens"
        raise
    task_id, model, created = accepted.task_id, accepted.model, accepted.created
    if not body.stream:

        def completion(*choices: Told) -> dict[str, Any]:
            return chat_completion(
                task_id,
                model=model,
                created=created,
                choices=choices,
                logprobs=body.alternatives is not None,
            )

        return await whole_answer(asked.request, asked.pod, accepted, asked.caller.id, completion)
    options = body.stream_options
    chunks = ChatChunks(
        task_id,
        model=model,
        created=created,
        choices=len(tasks),
        include_usage=bool(options and options.include_usage),
    )
    choices = [ChatChoice(chunks, index, task.sampling) for index, task in enumerate(tasks)]
    return streamed_answer(asked.pod, accepted, asked.caller.id, *choices)
