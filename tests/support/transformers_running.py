"""A transformers engine on a tiny model, and what it delivered."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from millstream.worker.engines.base import (
    EngineInfo,
    EngineSettings,
    GenerationRequest,
    StepOutput,
)
from millstream.worker.engines.transformers_engine import TransformersEngine

PROMPT = [10, 11, 12, 13, 14]


class Running:
    """A started engine and what it delivered."""

    def __init__(self, engine: TransformersEngine, source: str) -> None:
        self.engine = engine
        self.source = source
        self.info: EngineInfo
        self.steps: list[list[StepOutput]] = []
        self._moved = asyncio.Event()

    def on_step(self, outputs: list[StepOutput]) -> None:
        self.steps.append(outputs)
        self._moved.set()

    def submit(self, request_id: str, token_ids: Sequence[int] = PROMPT, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "prompt_length": len(token_ids),
            "max_new_tokens": 20,
            "seed": None,
            "fallback_seed": 1,
            "temperature": 0.0,
            **changes,
        }
        self.engine.submit(GenerationRequest(request_id=request_id, token_ids=token_ids, **fields))

    async def run(
        self, request_id: str, token_ids: Sequence[int] = PROMPT, **changes: Any
    ) -> list[int]:
        self.submit(request_id, token_ids, **changes)
        await self.finished(request_id)
        return self.tokens(request_id)

    def outputs(self, request_id: str) -> list[StepOutput]:
        return [o for step in self.steps for o in step if o.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token_id for o in self.outputs(request_id) for token_id in o.token_ids]

    def finish(self, request_id: str) -> StepOutput | None:
        ends = [o for o in self.outputs(request_id) if o.finish is not None]
        assert len(ends) <= 1
        return ends[0] if ends else None

    async def finished(self, *request_ids: str) -> None:
        await self.until(lambda: all(self.finish(name) for name in request_ids))

    async def until(self, condition: Callable[[], Any], *, within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, self.engine.health()
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), 0.05)

    async def settle(self) -> None:
        """Wait until the generation thread has nothing left."""
        scheduler = self.manager.batch_processor.scheduler
        await self.until(
            lambda: not scheduler.has_pending_requests() and self.manager.input_queue.empty()
        )

    @property
    def manager(self) -> Any:
        return self.engine._manager

    def blocks_in_use(self) -> int:
        cache = self.manager.batch_processor.cache
        cache.evict_cached_blocks()
        cache.pool.try_to_free_sectors()
        assert all(not a.block_table for a in cache.cache_allocators.values())
        assert all(not a.ledger.shared_ref_counts for a in cache.cache_allocators.values())
        return cache.num_sectors - cache.pool.num_free_sectors


@contextlib.asynccontextmanager
async def started(
    source: Any, *, cache_tokens: int | None = 2048, **settings: Any
) -> AsyncIterator[Running]:
    engine = TransformersEngine(
        EngineSettings(model="tiny", source=str(source), **settings), cache_tokens=cache_tokens
    )
    running = Running(engine, str(source))
    running.info = await engine.start(running.on_step)
    try:
        yield running
    finally:
        await engine.stop()
