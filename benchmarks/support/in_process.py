"""A model behind FastAPI in one process, as tutorials have it, on the engine that workers use.

    python -m benchmarks.support.in_process PORT

What a first token takes here is what it takes without a queue, a store and a relay.
"""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from millstream.shared.schemas import Message
from millstream.worker.detokenizer import open_detokenizer
from millstream.worker.engines.base import EngineSettings, GenerationRequest, StepOutput
from millstream.worker.engines.registry import create_engine

engine = create_engine("fake", EngineSettings(model="m", source="m"))
outputs: dict[str, asyncio.Queue[StepOutput]] = {}
numbers = itertools.count()
DONE = "data: [DONE]\n\n"


class Said(BaseModel):
    """A message."""

    role: str
    content: str


class Chat(BaseModel):
    """A chat's request, as far as it matters here."""

    model: str
    messages: list[Said]
    max_tokens: int = 64


def on_step(step: list[StepOutput]) -> None:
    """Hand each request what a step brought it."""
    for output in step:
        outputs[output.request_id].put_nowait(output)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
    """The engine runs as long as the app."""
    await engine.start(on_step)
    yield
    await engine.stop()


app = FastAPI(lifespan=lifespan)


@app.post("/v1/chat/completions")
async def chat(body: Chat) -> StreamingResponse:
    """A stream in OpenAI's form."""
    messages = [Message(said.role, said.content) for said in body.messages]
    return StreamingResponse(answer(messages, body.max_tokens), media_type="text/event-stream")


async def answer(messages: list[Message], max_tokens: int) -> AsyncGenerator[str]:
    """The chunks."""
    async for text, finish in generated(messages, max_tokens):
        yield chunk(text, finish)
    yield DONE


async def generated(
    messages: list[Message], max_tokens: int
) -> AsyncGenerator[tuple[str, str | None]]:
    """The text of each step, and at the end why it ends."""
    request_id = str(next(numbers))
    outputs[request_id] = queue = asyncio.Queue()
    prompt = engine.tokenizer.encode_chat(messages)
    engine.submit(
        GenerationRequest(
            request_id=request_id, token_ids=prompt, prompt_length=len(prompt),
            max_new_tokens=max_tokens, seed=None, fallback_seed=0,
        )
    )  # fmt: skip
    detokenizer = open_detokenizer(engine.tokenizer)
    finish = None
    while finish is None:
        output = await queue.get()
        finish = output.finish
        yield "".join(map(detokenizer.push, output.token_ids)), finish
    del outputs[request_id]


def chunk(text: str, finish: str | None) -> str:
    """An event of OpenAI's stream."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    whole = {"id": "x", "object": "chat.completion.chunk", "choices": [choice]}
    return f"data: {json.dumps(whole, separators=(',', ':'))}\n\n"


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=False, log_level="error")
