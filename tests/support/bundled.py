"""The bundled model in this process, and what it said."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from millstream.shared.schemas import Message
from millstream.worker.engines.base import (
    EngineSettings,
    GenerationRequest,
    StepOutput,
    TokenLogprobs,
)
from millstream.worker.engines.transformers_engine import TransformersEngine

SETTINGS = EngineSettings(model="bundled", source="bundled")


class Bundled:
    """An engine with it."""

    def __init__(self, **options: Any) -> None:
        self.engine = TransformersEngine(SETTINGS, **options)
        self.memory_before = 0
        self.said: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.ended: dict[str, StepOutput] = {}

    def on_step(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ended
            self.said.setdefault(output.request_id, []).extend(output.token_ids)
            self.logprobs.setdefault(output.request_id, []).extend(output.logprobs)
            if output.finish is not None:
                self.ended[output.request_id] = output

    def prompt(self, question: str) -> list[int]:
        return self.engine.tokenizer.encode_chat([Message("user", question)])

    def submit(
        self, name: str, prompt: Sequence[int], done: Sequence[int] = (), **changes: Any
    ) -> None:
        self.said.pop(name, None)
        self.ended.pop(name, None)
        self.engine.submit(
            GenerationRequest(
                request_id=name,
                token_ids=[*prompt, *done],
                prompt_length=len(prompt),
                **{
                    "max_new_tokens": 30 - len(done),
                    "seed": None,
                    "fallback_seed": 1,
                    "temperature": 0.0,
                    **changes,
                },
            )
        )

    async def until(self, condition, *, within_s: float = 150.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, self.engine.health()
            await asyncio.sleep(0.02)

    async def ends(self, *names: str) -> None:
        await self.until(lambda: all(name in self.ended for name in names))
