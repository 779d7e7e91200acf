"""What a fleet costs besides its models: CPU by tokens, memory by streams and tasks.

    python -m benchmarks.sizing [--streams 200] [--rate 20] [--seconds 15] [--json FILE]

A pod, a worker with the fake engine, and a Valkey with its append-only file. First all streams run
at a steady rate, and the processes' CPU is read at the beginning and at the end of that time. Then
1,000 streams of queued tasks are opened, and the pod's memory is compared.
"""

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil
from tests.support import native
from tests.support.local_fleet import LocalFleet
from tests.support.store import Store

from benchmarks.support.report import Row, finish

IDLE = 1000
SETTLE_S = 3.0
CLIENTS = httpx.Limits(max_connections=None)


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds that a process has used, in user and system."""
    times = process.cpu_times()
    return times.user + times.system


class Reader:
    """Reads streams, and counts their tokens."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.tokens = 0

    async def read(self, task_id: str, opened: asyncio.Event | None = None) -> None:
        """One stream to its end."""
        async with self._http.stream("GET", f"/tasks/{task_id}/stream") as answer:
            async for part in answer.aiter_raw():
                self.tokens += part.count(b"event: token")  # a part ends between two events
                if opened:
                    opened.set()


async def measure_tokens(
    fleet: LocalFleet,
    http: httpx.AsyncClient,
    processes: Mapping[str, psutil.Process],
    *,
    streams: int,
    rate: float,
    seconds: float,
) -> dict[str, float]:
    """CPU by tokens, and what Redis keeps of a task and a token."""
    tokens = int(rate * (seconds + 2 * SETTLE_S))
    before = (await fleet.redis.info("memory"))["used_memory"]
    ids = [await native.submit(http, tokens=tokens, rate=rate) for _ in range(streams)]
    tasks = (await fleet.redis.info("memory"))["used_memory"]
    reader = Reader(http)
    async with asyncio.TaskGroup() as group:
        for task_id in ids:
            group.create_task(reader.read(task_id))
        await asyncio.sleep(SETTLE_S)  # all have begun
        begin, read = time.monotonic(), reader.tokens
        used = {name: cpu_s(process) for name, process in processes.items()}
        await asyncio.sleep(seconds)
        took, made = time.monotonic() - begin, reader.tokens - read
        used = {name: cpu_s(process) - used[name] for name, process in processes.items()}
    kept = (await fleet.redis.info("memory"))["used_memory"]
    return {
        "tokens_per_s": made / took,
        **{f"{name}_us_per_token": 1e6 * s / made for name, s in used.items()},
        "redis_bytes_per_task": (tasks - before) / streams,
        "redis_bytes_per_token": (kept - tasks) / reader.tokens,
    }


async def measure_idle(http: httpx.AsyncClient, pod: psutil.Process) -> dict[str, float]:
    """A pod's memory by streams that wait: their tasks stand still."""
    before = pod.memory_info().rss
    async with contextlib.AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        readers: list[asyncio.Task[None]] = []
        for _ in range(IDLE):
            task_id = await native.submit(http, tokens=2, delay_s=600)
            opened = asyncio.Event()
            readers.append(tasks.create_task(Reader(http).read(task_id, opened)))
            await opened.wait()
        after = pod.memory_info().rss
        for reader in readers:
            reader.cancel()
    return {
        "pod_rss_mb": before / 2**20,
        "pod_kb_per_idle_stream": (after - before) / IDLE / 1024,
    }


async def run(*, streams: int, rate: float, seconds: float) -> list[Row]:
    """Start a fleet and do both."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store")
        try:
            settings = {"max_concurrent": 4096, "max_queue": 5000, "lease_s": 10}
            async with LocalFleet(store.url, Path(folder), **settings) as fleet:
                pod, worker = await asyncio.gather(fleet.api(), fleet.worker())
                processes = {
                    "pod": psutil.Process(pod.pid),
                    "worker": psutil.Process(worker.pid),
                    "redis": psutil.Process(store.popen.pid),
                }
                async with httpx.AsyncClient(base_url=pod.url, timeout=120, limits=CLIENTS) as http:
                    tokens = await measure_tokens(
                        fleet, http, processes, streams=streams, rate=rate, seconds=seconds
                    )
                    idle = await measure_idle(http, processes["pod"])
                    return [
                        Row("millstream", "a token", tokens), Row("millstream", "idle", idle)
                    ]  # fmt: skip
        finally:
            store.end()


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=200, help="at once")
    parser.add_argument("--rate", type=float, default=20, help="tokens per second of each")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--json", default=None, help="a file for the figures")
    options = vars(parser.parse_args(arguments))
    json_to = options.pop("json")
    return finish("sizing", asyncio.run(run(**options)), json_to=json_to)


if __name__ == "__main__":
    raise SystemExit(main())
