"""The usual queue: chats go into a Redis stream, a worker answers each into one of its own.

    python -m benchmarks.support.usual_queue PORT REDIS_URL

The app and the engine are those of `in_process`, each in a process now. What is told is kept, so
this is what a queue and a log cost by themselves: no attempt is fenced, no lease renewed, nobody's
turn kept, nothing stopped, and a worker that dies takes its chats along.
"""

import asyncio
import sys
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
import uvicorn
from benchmarks.support.in_process import DONE, Chat, chunk, engine, generated, on_step
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from millstream.shared.schemas import Message

QUEUE, GROUP = "queue", "workers"
KEPT_S = 600


def open_store(url: str) -> Any:
    """As most open it."""
    return redis.asyncio.Redis.from_url(url, decode_responses=True)


def served(store: Any, worker: list[str]) -> FastAPI:
    """The app; it starts its worker."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        await store.xgroup_create(QUEUE, GROUP, mkstream=True)
        process = await asyncio.create_subprocess_exec(*worker)
        yield
        process.terminate()

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/chat/completions")
    async def chat(body: Chat) -> StreamingResponse:
        log = f"log:{uuid.uuid4()}"
        await store.xadd(QUEUE, {"log": log, "request": body.model_dump_json()})
        return StreamingResponse(answer(store, log), media_type="text/event-stream")

    return app


async def answer(store: Any, log: str) -> AsyncGenerator[str]:
    """The chunks, as they come into the log."""
    last = "0"
    while True:
        for _, entries in await store.xread({log: last}, block=60_000) or ():
            for number, entry in entries:
                last = number
                yield chunk(entry["text"], entry["finish"] or None)
                if entry["finish"]:
                    yield DONE
                    return


async def work(store: Any) -> None:
    """Take chats as they come, and answer them all at once."""
    await engine.start(on_step)
    async with asyncio.TaskGroup() as group:
        while True:
            told = await store.xreadgroup(GROUP, "worker", {QUEUE: ">"}, count=16, block=1000)
            for _, entries in told:
                for entry, fields in entries:
                    group.create_task(write(store, entry, fields))


async def write(store: Any, entry: str, fields: dict[str, str]) -> None:
    """Answer a chat into its log."""
    body = Chat.model_validate_json(fields["request"])
    messages = [Message(said.role, said.content) for said in body.messages]
    async for text, finish in generated(messages, body.max_tokens):
        async with store.pipeline(transaction=False) as pipe:
            pipe.xadd(fields["log"], {"text": text, "finish": finish or ""})
            if finish:
                pipe.expire(fields["log"], KEPT_S)
                pipe.xack(QUEUE, GROUP, entry)
                pipe.xdel(QUEUE, entry)
            await pipe.execute()


if __name__ == "__main__":
    port, redis_url = sys.argv[1:]
    if port == "worker":
        asyncio.run(work(open_store(redis_url)))
    else:
        again = [sys.executable, "-m", "benchmarks.support.usual_queue", "worker", redis_url]
        uvicorn.run(
            served(open_store(redis_url), again),
            host="127.0.0.1",
            port=int(port),
            access_log=False,
            log_level="error",
        )
