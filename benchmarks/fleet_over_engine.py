"""Tokens/s and TTFT of the fleet over HTTP, against the same engine in this process.

    python benchmarks/fleet_over_engine.py http://127.0.0.1:8000

The fleet must be idle and serve the bundled model. Both do the same work in turns (greedy, the same
prompts, the same number of new tokens); medians over the rounds and their ratio are printed. While
one works the other is idle, but both are loaded: leave room for two copies of the model.
"""

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass

import httpx

from millstream.shared.schemas import Message
from millstream.worker.engines.base import EngineSettings, GenerationRequest, StepOutput
from millstream.worker.engines.registry import create_engine

PROMPTS = [f"Write a long story about miller number {number}." for number in range(64)]


@dataclass
class Run:
    """One round: tokens/s over all streams, and the median time to the first token in ms."""

    tokens_per_s: float
    ttft_ms: float


class InProcess:
    """The engine by itself."""

    def __init__(self) -> None:
        self.engine = create_engine(
            "transformers", EngineSettings(model="bundled", source="bundled")
        )
        self.count: dict[str, int] = {}
        self.first: dict[str, float] = {}
        self.left: set[str] = set()
        self.done = asyncio.Event()
        self.number = 0

    def on_step(self, outputs: list[StepOutput]) -> None:
        """Count what a step brought."""
        now = time.perf_counter()
        for output in outputs:
            if output.token_ids:
                self.first.setdefault(output.request_id, now)
                self.count[output.request_id] = self.count.get(output.request_id, 0) + len(
                    output.token_ids
                )
            if output.finish:
                self.left.discard(output.request_id)
        if not self.left:
            self.done.set()

    async def run(self, streams: int, tokens: int) -> Run:
        """One round."""
        requests = []
        for prompt in PROMPTS[:streams]:
            self.number += 1
            ids = self.engine.tokenizer.encode_chat([Message("user", prompt)])
            requests.append(
                GenerationRequest(
                    request_id=str(self.number),
                    token_ids=ids,
                    prompt_length=len(ids),
                    max_new_tokens=tokens,
                    seed=None,
                    fallback_seed=0,
                    temperature=0.0,
                )
            )
        self.count, self.first = {}, {}
        self.left = {request.request_id for request in requests}
        self.done.clear()
        began = time.perf_counter()
        for request in requests:
            self.engine.submit(request)
        await self.done.wait()
        took = time.perf_counter() - began
        ttft = statistics.median(at - began for at in self.first.values())
        return Run(sum(self.count.values()) / took, 1000 * ttft)


async def over_http(client: httpx.AsyncClient, streams: int, tokens: int) -> Run:
    """One round through a pod, Redis and a worker."""

    async def one(prompt: str) -> tuple[int, float]:
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first, count = 0.0, 0
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if chunk["usage"]:
                    count = chunk["usage"]["completion_tokens"]
                elif not first and chunk["choices"][0]["delta"].get("content"):
                    first = time.perf_counter() - began
        return count, first

    began = time.perf_counter()
    results = await asyncio.gather(*map(one, PROMPTS[:streams]))
    took = time.perf_counter() - began
    return Run(
        sum(count for count, _ in results) / took,
        1000 * statistics.median(first for _, first in results),
    )


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16])
    options = parser.parse_args()
    local = InProcess()
    info = await local.engine.start(local.on_step)
    print(f"{info.numerics}; {options.tokens} tokens, median of {options.rounds} rounds")
    print("streams | in process tok/s, TTFT ms | over HTTP tok/s, TTFT ms | ratio tok/s")
    async with httpx.AsyncClient(base_url=options.url, timeout=300) as client:
        for streams in options.streams:
            await local.run(streams, 4)
            await over_http(client, streams, 4)
            pairs = [
                (
                    await local.run(streams, options.tokens),
                    await over_http(client, streams, options.tokens),
                )
                for _ in range(options.rounds)
            ]
            alone = statistics.median(pair[0].tokens_per_s for pair in pairs)
            fleet = statistics.median(pair[1].tokens_per_s for pair in pairs)
            print(
                f"{streams:7} | {alone:.1f}, {statistics.median(p[0].ttft_ms for p in pairs):.0f}"
                f" | {fleet:.1f}, {statistics.median(p[1].ttft_ms for p in pairs):.0f}"
                f" | {statistics.median(p[1].tokens_per_s / p[0].tokens_per_s for p in pairs):.3f}"
            )
    await local.engine.stop()


if __name__ == "__main__":
    asyncio.run(main())
