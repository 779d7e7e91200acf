"""Responses of the fake engine: what is asked for, what it should say, and the wait for its end."""

import json
from typing import Any

import openai
from openai.types.responses import Response
from tests.support.waiting import eventually


def directed(prompt: str = "hello", **directive: object) -> str:
    return f"@fake {json.dumps(directive)}\n{prompt}"


def task_of(response_id: str) -> str:
    return response_id.removeprefix("resp_")


async def chat_text(client: openai.AsyncOpenAI, *turns: tuple[str, str]) -> str | None:
    """What the fake engine says to a conversation, whichever way it is asked."""
    messages: Any = [{"role": role, "content": content} for role, content in turns]
    answer = await client.chat.completions.create(model="fake", messages=messages)
    return answer.choices[0].message.content


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Response:
    async def look() -> Response | None:
        response = await client.responses.retrieve(response_id)
        return None if response.status in ("queued", "in_progress") else response

    return await eventually(look, what="the end of the response")
