"""What a token event costs a worker besides its engine: detokenizing, its log row, the script call.

    python -m benchmarks.worker_cost [--streams 1 4 16 32] [--steps 400]

Steps are made up and handed to the worker's own runner and publisher, which write to a Valkey of
its own, one step at a time. Figures are microseconds of this process's CPU a token, the median of
several batches of steps; beside them what `redis-py` costs in a pipeline of one XADD a token.
"""

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version

import uvloop

from benchmarks.support.processes import valkey
from benchmarks.support.report import Row, finish
from millstream.shared.connection import open_redis
from millstream.shared.content_filter import Filters
from millstream.shared.keys import Keys
from millstream.shared.schemas import new_task_id
from millstream.shared.scripts import Scripts
from millstream.worker.engines.base import EngineSettings, StepOutput, Tokenizer
from millstream.worker.engines.transformers_source import load_model
from millstream.worker.engines.transformers_tokenizer import TransformersTokenizer
from millstream.worker.job import Limits
from millstream.worker.metrics import WorkerMetrics
from millstream.worker.publisher import Publisher
from millstream.worker.runner import Runner
from millstream.worker.traces import AttemptTraces

SHARD = Keys(0)
BATCHES = 8
TEXT = "A log is numbered, durable and read by many; its writer may change, its text may not. "


class NoEngine:
    """Takes requests and does nothing: the steps are made up here."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def submit(self, request: object) -> None:
        """Nothing."""

    def cancel(self, request_id: str) -> None:
        """Nothing."""


class NeverLost:
    """A lease that always holds."""

    async def valid(self) -> None:
        """Return at once."""


async def per_token_us(
    step: Callable[[int], Awaitable[object]], *, streams: int, steps: int
) -> float:
    """CPU microseconds a token of `steps` steps, each of one token a stream."""
    costs: list[float] = []
    number = 0
    for _ in range(BATCHES):
        before = time.process_time()
        for _ in range(steps // BATCHES):
            number += 1
            await step(number)
        costs.append((time.process_time() - before) / (steps // BATCHES * streams))
    return statistics.median(costs) * 1e6


async def worker(client: object, tokenizer: Tokenizer, *, streams: int, steps: int) -> float:
    """The worker's runner and publisher."""
    scripts = Scripts(client)  # type: ignore[arg-type]
    publisher = Publisher(
        scripts, SHARD, worker_id="w", model="m", result_ttl_s=60, lease=NeverLost(),
        on_ended=lambda job: None, on_gone=lambda job: None,
    )  # fmt: skip

    runner = Runner(
        NoEngine(tokenizer), Limits(context_length=1 << 30, max_tokens=1 << 30),
        Filters(), WorkerMetrics(), AttemptTraces(None, "w"),
        on_unwritten=publisher.mark, on_engine_error=lambda job, error: None,
        on_left=lambda: None,
    )  # fmt: skip
    request = b'{"model":"m","prompt":"Tell me"}'
    for _ in range(streams):
        await scripts.submit(
            SHARD, task_id=new_task_id(0), model="m", caller="c", request=request,
            max_queue=10**6, live_ttl_s=3600,
        )  # fmt: skip
    claims, *_ = await scripts.claim(
        SHARD, worker="w", model="m", free=streams, running=0, lease_s=600, max_attempts=3,
        live_ttl_s=3600, result_ttl_s=60, max_task_s=3600, sweep=False,
    )  # fmt: skip
    for claim in claims:
        runner.start(claim)
    jobs = [job.request_id for job in runner.jobs()]
    writing = asyncio.create_task(publisher.run())
    text = tokenizer.encode(TEXT)

    async def step(number: int) -> None:
        token = (text[number % len(text)],)
        runner.on_step([StepOutput(request_id, token) for request_id in jobs])
        await publisher.flushed()

    figure = await per_token_us(step, streams=streams, steps=steps)
    writing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await writing
    return figure


async def pipeline(client: object, *, streams: int, steps: int) -> float:
    """redis-py as it is usually called: one XADD a token, a pipeline a step."""

    async def step(number: int) -> None:
        async with client.pipeline(transaction=False) as pipe:  # type: ignore[attr-defined]
            for stream in range(streams):
                pipe.xadd(f"log:{stream}", {"token": " word"}, id=f"0-{number}")
            await pipe.execute()

    return await per_token_us(step, streams=streams, steps=steps)


async def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 32, 128])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", default=None)
    arguments = parser.parse_args()
    rows: list[Row] = []
    rival = f"redis-py {version('redis')}, a pipeline a step"
    settings = EngineSettings(model="bundled", source="bundled")
    tokenizer = TransformersTokenizer(load_model(settings).tokenizer)
    with valkey() as store:
        async with open_redis(store.url) as client:
            for streams in arguments.streams:
                await client.flushdb()
                ours = await worker(client, tokenizer, streams=streams, steps=arguments.steps)
                await client.flushdb()
                theirs = await pipeline(client, streams=streams, steps=arguments.steps)
                rows += [
                    Row("millstream", f"{streams} streams", {"us_per_token": ours}),
                    Row(rival, f"{streams} streams", {"us_per_token": theirs}),
                ]
    finish("worker_cost", rows, json_to=arguments.json)


if __name__ == "__main__":
    uvloop.run(main())  # as a worker has it
