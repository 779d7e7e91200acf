"""The engine by itself, in the process of a benchmark: no queue, no store, no HTTP."""

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

from millstream.shared.schemas import Message
from millstream.worker.engines.base import EngineSettings, GenerationRequest, StepOutput
from millstream.worker.engines.registry import create_engine

PROMPTS = [f"Write a long story about miller number {number}." for number in range(64)]


class Heard:
    """What comes of one request.

    Args:
        asked: When it was submitted, by `time.perf_counter`.
    """

    def __init__(self, asked: float) -> None:
        self.asked = asked
        self.times: list[float] = []
        """When each token came."""
        self.done = asyncio.Event()
        self._came = asyncio.Event()

    def came(self, tokens: int) -> None:
        """So many are there now."""
        self.times += [time.perf_counter()] * tokens
        self._came.set()

    async def reached(self, tokens: int) -> None:
        """Wait until there are so many; it must have asked for as many."""
        while len(self.times) < tokens:
            self._came.clear()
            await self._came.wait()

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return 1000 * (self.times[0] - self.asked)

    def gaps_ms(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Times between tokens, of those that came within a time."""
        pairs = itertools.pairwise(self.times)
        return [1000 * (late - early) for early, late in pairs if begin < late <= end]


class Alone:
    """A loaded engine with the bundled model; an asynchronous context."""

    def __init__(self, *, dtype: str = "auto", max_concurrent: int = 32) -> None:
        settings = EngineSettings(
            model="bundled", source="bundled", dtype=dtype, max_concurrent=max_concurrent
        )
        self.engine = create_engine("transformers", settings)
        self.numerics = ""
        self._heard: dict[str, Heard] = {}
        self._numbers = itertools.count()

    async def __aenter__(self) -> "Alone":
        self.numerics = (await self.engine.start(self._on_step)).numerics
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.stop()

    def ask(self, *messages: Message, tokens: int, **parameters: Any) -> Heard:
        """Submit a chat; greedy, unless the parameters say otherwise."""
        ids = self.engine.tokenizer.encode_chat(messages)
        request_id = str(next(self._numbers))
        request = GenerationRequest(
            request_id=request_id,
            token_ids=ids,
            prompt_length=len(ids),
            max_new_tokens=tokens,
            fallback_seed=0,
            **{"seed": None, "temperature": 0.0, **parameters},
        )
        self._heard[request_id] = heard = Heard(time.perf_counter())
        self.engine.submit(request)
        return heard

    async def stories(self, streams: int, tokens: int, **parameters: Any) -> "Stories":
        """So many at once, to their ends."""
        began, busy = time.perf_counter(), time.process_time()
        heard = [
            self.ask(Message("user", prompt), tokens=tokens, **parameters)
            for prompt in PROMPTS[:streams]
        ]
        for each in heard:
            await each.done.wait()
        return Stories(heard, time.perf_counter() - began, time.process_time() - busy)

    def _on_step(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            heard = self._heard[output.request_id]
            heard.came(len(output.token_ids))
            if output.finish:
                del self._heard[output.request_id]
                heard.done.set()


class Stories:
    """A round of streams that were asked for at once."""

    def __init__(self, heard: Sequence[Heard], took_s: float, cpu_s: float) -> None:
        count = sum(len(each.times) for each in heard)
        self.tokens_per_s = count / took_s
        self.cpu_ms_per_token = 1000 * cpu_s / count
        self.ttft_ms = statistics.median(each.ttft_ms for each in heard)
        self.itl_ms = statistics.median(gap for each in heard for gap in each.gaps_ms())
