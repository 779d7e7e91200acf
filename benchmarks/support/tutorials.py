"""The tutorials' app: `generate` in a thread a request, streamed by FastAPI; maybe one at a time.

python -m benchmarks.support.tutorials FOLDER DTYPE PORT [lock]
"""

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import AsyncGenerator
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

folder, dtype, port = sys.argv[1:4]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
turn = threading.Lock() if "lock" in sys.argv[4:] else contextlib.nullcontext()


class Chat(BaseModel):
    """A chat's request, as far as it matters here."""

    messages: list[dict[str, str]]
    max_tokens: int = 64


class Streamer(BaseStreamer):
    """Hands each token's text to the event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[str | None] = asyncio.Queue()
        self.prompt = True

    def put(self, value: Any) -> None:
        """The prompt comes first."""
        if not self.prompt:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, tokenizer.decode(value))
        self.prompt = False

    def end(self) -> None:
        """No more."""
        self.loop.call_soon_threadsafe(self.queue.put_nowait, None)


app = FastAPI()


@app.post("/v1/chat/completions")
async def chat(body: Chat) -> StreamingResponse:
    """A stream in OpenAI's form."""
    inputs = tokenizer.apply_chat_template(
        body.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    streamer = Streamer()

    def generate() -> None:
        with turn:
            model.generate(
                **inputs, max_new_tokens=body.max_tokens, do_sample=False, streamer=streamer
            )

    threading.Thread(target=generate, daemon=True).start()
    return StreamingResponse(answer(streamer.queue), media_type="text/event-stream")


async def answer(queue: asyncio.Queue[str | None]) -> AsyncGenerator[str]:
    """The chunks, and the usage at the end."""
    count = 0
    while (text := await queue.get()) is not None:
        count += 1
        yield chunk(choices=[{"index": 0, "delta": {"content": text}}])
    yield chunk(choices=[], usage={"completion_tokens": count})
    yield "data: [DONE]\n\n"


def chunk(**fields: Any) -> str:
    """One event."""
    whole = {"id": "x", "object": "chat.completion.chunk", **fields}
    return f"data: {json.dumps(whole, separators=(',', ':'))}\n\n"


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(port), access_log=False, log_level="error")
