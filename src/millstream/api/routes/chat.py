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
from millstream.shared.schemas import TaskRequest

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
    messages = mapping.messages_of(body.messages)
    sampling = mapping.sampling_of(body, mapping.chat_max_tokens(body))
    if body.stream:
        await slot.take()
    key = request.headers.get("idempotency-key")
    accepted = await pod.admission.submit(
        *(
            TaskRequest(body.model or "", messages, sampling=choice)
            for choice in mapping.choices_of(sampling, body.n or 1)
        ),
        caller=caller,
        idempotency_key=key,
        body=raw,
        # Who sends a key means to come back for the answer: it is not bound to this connection.
        attached=key is None,
    )
    task_id, model, created = accepted.task_id, accepted.model, int(time.time())
    if not body.stream:

        def completion(*choices: Told) -> dict[str, Any]:
            return chat_completion(task_id, model=model, created=created, choices=choices)

        return await whole_answer(request, pod, accepted, caller.id, completion)
    options, count = body.stream_options, len(accepted.task_ids)
    chunks = ChatChunks(
        task_id,
        model=model,
        created=created,
        choices=count,
        include_usage=bool(options and options.include_usage),
    )
    choices = [ChatChoice(chunks, index) for index in range(count)]
    return await streamed_answer(pod, accepted, caller.id, *choices)
