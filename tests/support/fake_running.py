"""A fake engine that runs, what it is asked, and what it delivered."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from millstream.shared.schemas import Message
from millstream.worker.engines.base import (
    EngineInfo,
    EngineSettings,
    GenerationRequest,
    StepOutput,
)
from millstream.worker.engines.fake import FakeEngine
from millstream.worker.engines.fake_script import FakeTokenizer

TOKENIZER = FakeTokenizer()
SETTINGS = EngineSettings(model="fake", source="fake")


def directive(**fields: Any) -> str:
    return f"@fake {json.dumps(fields)}"


def request(
    prompt: str | Sequence[Message],
    request_id: str = "task:1",
    *,
    emitted: Sequence[int] = (),
    max_new_tokens: int = 1_000,
    seed: int | None = None,
    fallback_seed: int = 1,
) -> GenerationRequest:
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else TOKENIZER.encode_chat(prompt)
    return GenerationRequest(
        request_id=request_id,
        token_ids=[*ids, *emitted],
        prompt_length=len(ids),
        max_new_tokens=max_new_tokens,
        seed=seed,
        fallback_seed=fallback_seed,
    )


class Running:
    """A started engine, what it delivered, and waits for it."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.steps: list[list[StepOutput]] = []
        self.info: EngineInfo
        self._news = asyncio.Event()

    async def start(self) -> None:
        self.info = await self.engine.start(self._on_step)

    def _on_step(self, outputs: list[StepOutput]) -> None:
        self.steps.append(outputs)
        self._news.set()

    def outputs(self, request_id: str = "task:1") -> list[StepOutput]:
        return [each for step in self.steps for each in step if each.request_id == request_id]

    def token_ids(self, request_id: str = "task:1") -> list[int]:
        return [each for output in self.outputs(request_id) for each in output.token_ids]

    def finish(self, request_id: str = "task:1") -> str | None:
        outputs = self.outputs(request_id)
        return outputs[-1].finish if outputs else None

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def run(self, generation: GenerationRequest) -> tuple[list[int], str | None]:
        """Run one request to its end; its tokens and how it ended."""
        self.engine.submit(generation)
        await self.until(lambda: self.finish(generation.request_id))
        return self.token_ids(generation.request_id), self.finish(generation.request_id)

    async def say(self, prompt: str | Sequence[Message]) -> tuple[list[str], str | None]:
        """Run a prompt to its end; the texts of its tokens and how it ended."""
        ids, finish = await self.run(request(prompt))
        return [TOKENIZER.decode([each]) for each in ids], finish


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "fake-engine"]


def wait_for(condition: Callable[[], bool]) -> None:
    """Block until another thread has made it true."""
    deadline = time.monotonic() + 4
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)
