"""LiteLLM's SDK, as its documentation uses it for an OpenAI-compatible server."""

import asyncio
from typing import Any

import litellm
import openai
from plan import KEYED, OPEN, PLAN, fault, state_once_left, tell

litellm.suppress_debug_info = True  # it prints advice to standard output
TASK = "chatcmpl-"


def options(prompt: str, **more: Any) -> dict[str, Any]:
    return {
        "model": f"openai/{PLAN['model']}",
        "messages": [{"role": "user", "content": prompt}],
        "api_base": OPEN,
        "api_key": "none",
        **more,
    }


def conversation() -> dict[str, Any]:
    asked = options(PLAN["first"])
    first = litellm.completion(**asked)
    asked["messages"] += [
        first.choices[0].message,  # as it came
        {"role": "user", "content": PLAN["second"]},
    ]
    second = litellm.completion(**asked)
    return {
        "texts": [turn.choices[0].message.content for turn in (first, second)],
        "prompt_tokens": [turn.usage.prompt_tokens for turn in (first, second)],
    }


def stream() -> dict[str, Any]:
    asked = options(PLAN["streamed"], stream=True, stream_options={"include_usage": True})
    chunks = list(litellm.completion(**asked))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    usage = chunks[-1].usage
    return {
        "pieces": [choice.delta.content for choice in choices],
        "finish_reason": choices[-1].finish_reason,
        "usage": [usage.prompt_tokens, usage.completion_tokens],
    }


def cancel() -> dict[str, str]:
    """Leave the block after three chunks."""
    task_id = ""
    with litellm.completion(**options(PLAN["endless"], stream=True)) as chunks:
        for _, chunk in zip(range(4), chunks, strict=False):
            task_id = chunk.id.removeprefix(TASK)
    return {"task_id": task_id, "state": state_once_left(task_id)}


async def cancel_async() -> dict[str, str]:
    """Cancel the task that reads."""
    seen: list[str] = []
    fourth = asyncio.Event()

    async def read() -> None:
        async with await litellm.acompletion(**options(PLAN["endless"], stream=True)) as chunks:
            async for chunk in chunks:
                seen.append(chunk.id)
                if len(seen) == 4:
                    fourth.set()

    reading = asyncio.create_task(read())
    await fourth.wait()
    reading.cancel()
    await asyncio.wait({reading})
    task_id = seen[0].removeprefix(TASK)
    return {"task_id": task_id, "state": await asyncio.to_thread(state_once_left, task_id)}


def limited() -> dict[str, Any]:
    """A second stream is refused while the first is open; the client comes back when told to."""
    refusals: list[str | None] = []
    keyed = {"api_base": KEYED, "api_key": PLAN["key"], "stream": True}
    first = litellm.completion(**options(PLAN["endless"], **keyed))
    next(first)

    def look(response: Any) -> None:
        if response.status_code == 429:
            refusals.append(response.headers.get("retry-after"))
            first.close()

    with openai.DefaultHttpxClient(event_hooks={"response": [look]}) as http:
        client = openai.OpenAI(base_url=KEYED, api_key=PLAN["key"], max_retries=5, http_client=http)
        chunks = litellm.completion(**options(PLAN["streamed"], **keyed, client=client))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return {"refusals": refusals, "text": text}


def completion(**more: Any) -> Any:
    return lambda: litellm.completion(**options("x", **more))


def text_completion() -> str:
    asked = {**options(""), "prompt": PLAN["first"]}
    del asked["messages"]
    return litellm.text_completion(**asked).choices[0].text


def response() -> str:
    asked = {**options(""), "input": PLAN["first"]}
    del asked["messages"]
    return litellm.responses(**asked).output[0].content[0].text


tell(
    conversation=conversation(),
    stream=stream(),
    cancel=cancel(),
    cancel_async=asyncio.run(cancel_async()),
    no_model=fault(completion(model="openai/gpt-9")),
    too_hot=fault(completion(temperature=7)),
    wrong_key=fault(completion(api_base=KEYED)),
    limited=limited(),
    text_completion=text_completion(),
    response=response(),
)
