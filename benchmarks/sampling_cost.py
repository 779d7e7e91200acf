"""What the sampling parameters cost: the bundled model in this process, 16 streams.

    python benchmarks/sampling_cost.py [--rounds 3] [--tokens 64]

All ways are measured in turns. CPU time per token is steadier than tokens/s on a busy machine.
"""

import argparse
import asyncio
import statistics
import time
from typing import Any

from millstream.shared.schemas import Message
from millstream.worker.engines.base import EngineSettings, GenerationRequest, StepOutput
from millstream.worker.engines.registry import create_engine

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
    "greedy, penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "greedy, 1,024 biases": {"temperature": 0.0, "logit_bias": dict.fromkeys(range(1024), 1.0)},
    "sampled, min_p": {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05},
    "greedy, 20 logprobs": {"temperature": 0.0, "logprobs": 20},
}


class Bench:
    """An engine, and how long it takes."""

    def __init__(self) -> None:
        settings = EngineSettings(model="bundled", source="bundled")
        self.engine = create_engine("transformers", settings)
        self.left: set[str] = set()
        self.tokens = 0
        self.done = asyncio.Event()
        self.number = 0

    def on_step(self, outputs: list[StepOutput]) -> None:
        """Count what a step brought."""
        for output in outputs:
            self.tokens += len(output.token_ids)
            if output.finish:
                self.left.discard(output.request_id)
        if not self.left:
            self.done.set()

    async def run(self, streams: int, tokens: int, **asked: Any) -> tuple[float, float]:
        """Tokens/s and CPU ms a token."""
        self.tokens = 0
        self.done.clear()
        cpu, began = time.process_time(), time.perf_counter()
        for stream in range(streams):
            self.number += 1
            message = Message("user", f"Write a long story about miller number {stream}.")
            ids = self.engine.tokenizer.encode_chat([message])
            request = GenerationRequest(
                request_id=str(self.number),
                token_ids=ids,
                prompt_length=len(ids),
                max_new_tokens=tokens,
                seed=stream,
                fallback_seed=0,
                **asked,
            )
            self.left.add(request.request_id)
            self.engine.submit(request)
        await self.done.wait()
        took, used = time.perf_counter() - began, time.process_time() - cpu
        return self.tokens / took, 1000 * used / self.tokens


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    options = parser.parse_args()
    bench = Bench()
    info = await bench.engine.start(bench.on_step)
    print(f"{info.numerics}; {options.streams} streams, {options.tokens} tokens each")
    await bench.run(options.streams, 4, **WAYS["greedy"])
    results: dict[str, list[tuple[float, float]]] = {way: [] for way in options.ways}
    for _ in range(options.rounds):
        for way in options.ways:
            results[way].append(await bench.run(options.streams, options.tokens, **WAYS[way]))
    for way, runs in results.items():
        rate = statistics.median(run[0] for run in runs)
        cpu = statistics.median(run[1] for run in runs)
        print(f"{way:22} {rate:7.1f} tokens/s {cpu:7.2f} ms of CPU a token")
    await bench.engine.stop()


if __name__ == "__main__":
    asyncio.run(main())
