"""The readers' process as a benchmark speaks to it."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.support.processes import child


def post(path: str, body: dict[str, Any]) -> str:
    """A whole request that opens a stream."""
    text = json.dumps(body)
    return (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer x\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}"
    )


def get(path: str) -> str:
    """The same without a body."""
    return f"GET {path} HTTP/1.1\r\nHost: bench\r\nAccept: text/event-stream\r\n\r\n"


def chat(content: str, *, max_tokens: int = 9) -> str:
    """A chat as a stream, as every peer takes it."""
    messages = [{"role": "user", "content": content}]
    return post(
        "/v1/chat/completions",
        {"model": "m", "messages": messages, "stream": True, "max_tokens": max_tokens},
    )


class Crowd:
    """Open streams."""

    def __init__(self, process: Any) -> None:
        self._process = process

    def say(self, line: str) -> None:
        """A line to it."""
        self._process.stdin.write(line.encode() + b"\n")

    async def line(self) -> bytes:
        """The next line of it.

        Raises:
            RuntimeError: a stream was refused.
        """
        line = await self._process.stdout.readline()
        if not line or line.startswith(b"refused"):
            raise RuntimeError(f"the readers: {line.decode()}")
        return line

    async def report(self) -> dict[str, float]:
        """What came since the last time."""
        self.say("report")
        while True:
            line = await self.line()
            if line.startswith(b"{"):
                return json.loads(line)


@asynccontextmanager
async def crowd(port: int, requests: Sequence[str], *, step: int = 0) -> AsyncGenerator[Crowd]:
    """So many streams, all open; with `step` a line comes whenever so many more tokens have."""
    process = await child("benchmarks.support.readers")
    opened = Crowd(process)
    try:
        order = {"port": port, "requests": list(requests), "step": step}
        opened.say(json.dumps(order))
        await opened.line()
        yield opened
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
