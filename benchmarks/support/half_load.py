"""Clients that keep streams open all the time, in every form a fleet is asked in."""

import asyncio
import json
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.support.lean_http import Answer, asked
from benchmarks.support.tally import Tally

FEWEST, MOST = 10, 200  # tokens of an answer
PATIENCE_S = 60.0  # the longest answer takes 7 s
CANCELLED_S = 5.0
SHARES = {
    "chat": 35,
    "task": 25,
    "response": 8,
    "whole": 10,
    "stopped": 6,
    "left": 6,
    "resumed": 6,
    "repeated": 4,
}
"""How often each form is chosen; ids that nobody knows are asked for besides."""
UNKNOWN, UNKNOWN_SHARE = "unknown", 0.05
REAL, REAL_TOKENS = "real model", 40

CHAT, NATIVE, RESPONSE = (
    b'"delta":{"content":',
    b"event: token",
    b"event: response.output_text.delta",
)
"""What a token's frame has in it, and no other frame."""


class Unexpected(Exception):
    """An answer is not what it must be."""


@dataclass(slots=True)
class Read:
    """What was read of a stream."""

    tokens: int = 0
    last_id: str = ""
    end: bytes = b""
    """The last frame."""


class Clients:
    """All of them; each asks any of the pods, as a balancer would choose."""

    def __init__(self, ports: Sequence[int], tally: Tally, *, seed: int) -> None:
        self._ports = ports
        self._tally = tally
        self._random = random.Random(seed)

    async def keep_asking(self) -> None:
        """One request after the other."""
        while True:
            await self.ask(self._random.choices(list(SHARES), list(SHARES.values()))[0])
            if self._random.random() < UNKNOWN_SHARE:
                await self.ask(UNKNOWN)

    async def ask(self, form: str) -> None:
        """One request of a form, or for an id that nobody knows."""
        await self._attempt(form, getattr(self, f"_{form}"))

    async def keep_asking_real(self, model: str, every_s: float) -> None:
        """A short sampled answer of a real model now and then."""

        async def real(form: str) -> int:
            word = self._random.choice(["rivers", "bread", "winter", "clocks", "the sea"])
            messages = [{"role": "user", "content": f"Tell me something about {word}."}]
            body = {"model": model, "messages": messages, "max_tokens": REAL_TOKENS,
                    "temperature": 0.8, "seed": self._random.getrandbits(32)}  # fmt: skip
            read = await self._stream_chat(form, body)
            _expect(0 < read.tokens <= REAL_TOKENS, f"{read.tokens} tokens")
            return read.tokens

        while True:
            due = time.monotonic() + every_s
            await self._attempt(REAL, real)
            await asyncio.sleep(due - time.monotonic())

    async def _attempt(self, form: str, ask: Any) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                self._tally.served(form, await ask(form))
        except (Unexpected, OSError, TimeoutError) as error:
            self._tally.failed(form, f"{type(error).__name__} {error}")
            await asyncio.sleep(1)  # whatever is wrong, it is not to be flooded

    # The forms. Each gives the tokens that came.

    async def _chat(self, form: str) -> int:
        tokens, body = self._new_chat()
        read = await self._stream_chat(form, body)
        return _complete(read.tokens, tokens)

    async def _repeated(self, form: str) -> int:
        tokens, body = self._new_chat()
        key = uuid.uuid4().hex
        read = await self._stream_chat(form, body, key=key)
        _complete(read.tokens, tokens)
        again = await self._stream_chat(form, body, key=key, timed=False)
        return _complete(again.tokens, tokens)

    async def _left(self, form: str) -> int:
        tokens, body = self._new_chat()
        began = time.monotonic()
        body = body | {"stream": True}
        async with asked(self._port(), "/v1/chat/completions", body) as answer:
            _expect(answer.status == 200, f"status {answer.status}")
            read = await self._read(form, answer, CHAT, began, leave_after=tokens // 2)
            task_id = answer.headers["x-task-id"]
        until = time.monotonic() + CANCELLED_S
        while (state := (await self._json(f"/tasks/{task_id}"))["status"]) == "running":
            _expect(time.monotonic() < until, "still running")
            await asyncio.sleep(0.05)
        _expect(state == "cancelled", state)
        return read.tokens

    async def _whole(self, form: str) -> int:
        tokens, body = self._new_chat()
        answer = await self._json("/v1/chat/completions", body | {"stream": False})
        return _complete(answer["usage"]["completion_tokens"], tokens)

    async def _response(self, form: str) -> int:
        tokens, text = self._new_text()
        began = time.monotonic()
        body = {"model": "fake", "input": text, "stream": True}
        async with asked(self._port(), "/v1/responses", body) as answer:
            _expect(answer.status == 200, f"status {answer.status}")
            read = await self._read(form, answer, RESPONSE, began)
        _ended(read, b"event: response.completed")
        return _complete(read.tokens, tokens)

    async def _task(self, form: str) -> int:
        tokens, task_id, began = await self._submit()
        read = await self._stream_task(form, task_id, began)
        _ended(read, b"event: completed")
        return _complete(read.tokens, tokens)

    async def _stopped(self, form: str) -> int:
        tokens, task_id, began = await self._submit()
        read = await self._stream_task(form, task_id, began, leave_after=tokens // 2)
        await self._json(f"/tasks/{task_id}/stop", {})
        rest = await self._stream_task(form, task_id, None, after=read.last_id)
        _ended(rest, b"event: cancelled")
        return read.tokens + rest.tokens

    async def _resumed(self, form: str) -> int:
        tokens, task_id, began = await self._submit()
        read = await self._stream_task(form, task_id, began, leave_after=tokens // 2)
        rest = await self._stream_task(form, task_id, None, after=read.last_id)
        _ended(rest, b"event: completed")
        return _complete(read.tokens + rest.tokens, tokens)

    async def _unknown(self, form: str) -> int:
        name = "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz", k=26))
        async with asked(self._port(), f"/tasks/t0-{name}/stream") as answer:
            _expect(answer.status == 404, f"status {answer.status}")
            await answer.body()
        return 0

    # What they are made of.

    def _port(self) -> int:
        return self._random.choice(self._ports)

    def _new_text(self) -> tuple[int, str]:
        """A number of tokens, and a prompt that asks for it; no two are the same."""
        tokens = self._random.randint(FEWEST, MOST)
        words = "Tell me more of it. " * self._random.randint(1, 20)
        return tokens, f'@fake {{"tokens": {tokens}}}\n{self._random.getrandbits(64)} {words}'

    def _new_chat(self) -> tuple[int, dict[str, Any]]:
        tokens, text = self._new_text()
        return tokens, {"model": "fake", "messages": [{"role": "user", "content": text}]}

    async def _json(self, path: str, body: Any = None) -> Any:
        async with asked(self._port(), path, body) as answer:
            text = await answer.body()
            _expect(answer.status in (200, 202), f"status {answer.status}")
            return json.loads(text)

    async def _submit(self) -> tuple[int, str, float]:
        """A task: its tokens, its id, and when it was asked for."""
        tokens, prompt = self._new_text()
        began = time.monotonic()
        answer = await self._json("/tasks", {"model": "fake", "prompt": prompt})
        return tokens, answer["task_id"], began

    async def _stream_chat(
        self, form: str, body: dict[str, Any], *, key: str = "", timed: bool = True
    ) -> Read:
        began = time.monotonic() if timed else None
        headers = {"Idempotency-Key": key} if key else {}
        body = body | {"stream": True}
        async with asked(self._port(), "/v1/chat/completions", body, headers=headers) as answer:
            _expect(answer.status == 200, f"status {answer.status}")
            read = await self._read(form, answer, CHAT, began)
        _ended(read, b"data: [DONE]")
        return read

    async def _stream_task(
        self,
        form: str,
        task_id: str,
        began: float | None,
        *,
        after: str = "",
        leave_after: int | None = None,
    ) -> Read:
        headers = {"Last-Event-ID": after} if after else {}
        async with asked(self._port(), f"/tasks/{task_id}/stream", headers=headers) as answer:
            _expect(answer.status == 200, f"status {answer.status}")
            return await self._read(form, answer, NATIVE, began, leave_after=leave_after)

    async def _read(
        self,
        form: str,
        answer: Answer,
        mark: bytes,
        began: float | None,
        *,
        leave_after: int | None = None,
    ) -> Read:
        """Read to the end, or until so many tokens have come; who comes back is not timed."""
        read = Read()
        last: float | None = None
        async for frames in answer.frames():
            now = time.monotonic()
            if came := sum(mark in frame for frame in frames):
                if last is not None:
                    self._tally.gap(form, now - last)
                elif began is not None:
                    self._tally.first(form, now - began)
                last = now if began is not None else None
                read.tokens += came
            read.end = frames[-1]
            if read.end.startswith(b"id: "):
                read.last_id = read.end[4 : read.end.index(b"\n")].decode()
            if leave_after is not None and read.tokens >= leave_after:
                return read
        _expect(answer.whole, "the connection was lost")
        return read


def _expect(fulfilled: bool, otherwise: str) -> None:
    if not fulfilled:
        raise Unexpected(otherwise)


def _complete(came: int, asked_for: int) -> int:
    _expect(came == asked_for, "tokens are missing or too many")
    return came


def _ended(read: Read, by: bytes) -> None:
    _expect(by in read.end, f"ended by {read.end[:80]!r}")
