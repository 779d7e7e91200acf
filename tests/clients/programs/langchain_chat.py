"""LangChain's `ChatOpenAI`, as its documentation uses it."""

import asyncio
from typing import Any

import openai
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from plan import KEYED, OPEN, PLAN, fault, state_once_left, tell


def model(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(**{"model": PLAN["model"], "base_url": OPEN, "api_key": "none", **options})


def conversation(chat: ChatOpenAI) -> dict[str, Any]:
    messages: list[Any] = [HumanMessage(PLAN["first"])]
    first = chat.invoke(messages)
    second = chat.invoke([*messages, first, HumanMessage(PLAN["second"])])
    return {
        "texts": [first.text, second.text],
        "prompt_tokens": [turn.usage_metadata["input_tokens"] for turn in (first, second)],
    }


def stream(chat: ChatOpenAI) -> dict[str, Any]:
    chunks = list(chat.stream(PLAN["streamed"]))
    whole = sum(chunks[1:], start=chunks[0])
    usage = whole.usage_metadata
    return {
        "pieces": [chunk.text for chunk in chunks],
        "finish_reason": whole.response_metadata.get("finish_reason"),
        "usage": [usage["input_tokens"], usage["output_tokens"]],
    }


def cancel() -> dict[str, str]:
    """Leave the loop after three chunks."""
    chunks = model(include_response_headers=True).stream(PLAN["endless"])
    task_id = ""
    for _, chunk in zip(range(4), chunks, strict=False):
        task_id = chunk.response_metadata.get("headers", {}).get("x-task-id", task_id)
    chunks.close()
    return {"task_id": task_id, "state": state_once_left(task_id)}


async def cancel_async() -> dict[str, str]:
    """Cancel the task that reads."""
    told: dict[str, str] = {}
    third = asyncio.Event()

    async def read() -> None:
        number = 0
        async for chunk in model(include_response_headers=True).astream(PLAN["endless"]):
            told.update(chunk.response_metadata.get("headers", {}))
            number += 1
            if number == 4:
                third.set()

    reading = asyncio.create_task(read())
    await third.wait()
    reading.cancel()
    await asyncio.wait({reading})
    task_id = told["x-task-id"]
    return {"task_id": task_id, "state": await asyncio.to_thread(state_once_left, task_id)}


def limited() -> dict[str, Any]:
    """A second stream is refused while the first is open; the client comes back when told to."""
    refusals: list[str | None] = []
    first = model(base_url=KEYED, api_key=PLAN["key"]).stream(PLAN["endless"])
    next(first)

    def look(response: Any) -> None:
        if response.status_code == 429:
            refusals.append(response.headers.get("retry-after"))
            first.close()

    with openai.DefaultHttpxClient(event_hooks={"response": [look]}) as http:
        second = model(base_url=KEYED, api_key=PLAN["key"], max_retries=5, http_client=http)
        text = "".join(chunk.text for chunk in second.stream(PLAN["streamed"]))
    return {"refusals": refusals, "text": text}


responses = model(use_responses_api=True)
tell(
    conversation=conversation(model()),
    stream=stream(model(stream_usage=True)),
    cancel=cancel(),
    cancel_async=asyncio.run(cancel_async()),
    no_model=fault(lambda: model(model="gpt-9").invoke("x")),
    too_hot=fault(lambda: model(temperature=7).invoke("x")),
    wrong_key=fault(lambda: model(base_url=KEYED).invoke("x")),
    limited=limited(),
    responses_conversation=conversation(responses),
    responses_chained=conversation(model(use_responses_api=True, use_previous_response_id=True)),
    responses_stream=stream(responses),
)
