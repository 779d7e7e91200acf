"""Tokens/s and TTFT of the fleet over HTTP, against the same engine in this process.

    python -m benchmarks.fleet_over_engine [--url http://127.0.0.1:8000] [--json FILE]

A pod and a worker with the bundled model, of its own, or an idle fleet that serves it. Both do the
same work in turns (greedy, the same prompts, the same number of new tokens); medians over the
rounds and their ratio. While one works the other is idle, but both are loaded: leave room for two
copies of the model. `others_percent` is what pod, store and clients take of the cores: where an
engine keeps all of them busy, it is what the ratio cannot but lack.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.support.asker import Asker, asker
from benchmarks.support.crowd import post
from benchmarks.support.processes import cpu_s
from benchmarks.support.report import Row, finish
from tests.support.local_fleet import LocalFleet
from tests.support.store import Store

from millstream.shared.schemas import Message
from millstream.worker.engines.base import EngineSettings, GenerationRequest, StepOutput
from millstream.worker.engines.registry import create_engine

LOAD_S = 120.0
PROMPTS = [f"Write a long story about miller number {number}." for number in range(64)]


@dataclass
class Run:
    """One round: tokens/s over all streams, and the median time to the first token in ms."""

    tokens_per_s: float
    ttft_ms: float
    others_percent: float = 0.0
    """Of all cores' time, what pod, store and clients took."""


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


class Fleet:
    """A pod, a store and a worker with the bundled model, or a server that has one."""

    def __init__(self, url: str, pids: Sequence[int] = ()) -> None:
        self.address = urlsplit(url)
        self.pids = pids
        """Of the processes whose CPU is missing where the engine is."""

    async def run(self, clients: Asker, streams: int, tokens: int) -> Run:
        """One round over HTTP."""
        requests = [
            post(
                "/v1/chat/completions",
                {
                    "model": "bundled",
                    "messages": [{"role": "user", "content": prompt}],
                    "max_tokens": tokens,
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                },
            )
            for prompt in PROMPTS[:streams]
        ]
        before = sum(map(cpu_s, self.pids))
        answer = await clients.ask(
            self.address.hostname or "127.0.0.1", self.address.port or 80, requests
        )
        spent = sum(map(cpu_s, self.pids)) - before + answer.cpu_s
        return Run(
            answer.tokens / answer.took_s,
            1000 * statistics.median(answer.first_s),
            100 * spent / (answer.took_s * (os.cpu_count() or 1)),
        )


@asynccontextmanager
async def fleet(url: str | None) -> AsyncGenerator[Fleet]:
    """That one, or one that is started and ended here."""
    if url is not None:
        yield Fleet(url)
        return
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store")
        settings = {"engine": "transformers", "model": "bundled", "model_source": "bundled"}
        try:
            async with LocalFleet(store.url, Path(folder), lease_s=10, **settings) as started:
                pod, _ = await asyncio.gather(started.api(), started.worker(within_s=LOAD_S))
                yield Fleet(pod.url, [pod.pid, store.popen.pid])
        finally:
            store.end()


async def run(options: argparse.Namespace) -> list[Row]:
    """Both in turns, for each number of streams."""
    local = InProcess()
    rows: list[Row] = []
    async with fleet(options.url) as served, asker() as clients:
        await local.engine.start(local.on_step)
        for streams in options.streams:
            await local.run(streams, 4)
            await served.run(clients, streams, 4)
            pairs = [
                (
                    await local.run(streams, options.tokens),
                    await served.run(clients, streams, options.tokens),
                )
                for _ in range(options.rounds)
            ]
            alone, over = zip(*pairs, strict=True)
            figures = {
                "alone_tokens_per_s": statistics.median(one.tokens_per_s for one in alone),
                "alone_ttft_ms": statistics.median(one.ttft_ms for one in alone),
                "fleet_tokens_per_s": statistics.median(one.tokens_per_s for one in over),
                "fleet_ttft_ms": statistics.median(one.ttft_ms for one in over),
                "ratio": statistics.median(b.tokens_per_s / a.tokens_per_s for a, b in pairs),
                "others_percent": statistics.median(one.others_percent for one in over),
            }
            rows.append(Row("millstream", f"{streams} streams", figures))
        await local.engine.stop()
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default=None, help="of a fleet that runs already")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--json", default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    return finish("fleet_over_engine", asyncio.run(run(options)), json_to=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
