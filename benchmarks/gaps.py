"""The silence a reader meets when the worker of its task dies, or is told to go.

    python -m benchmarks.gaps [--rounds 3] [--json FILE]

A fleet of one pod and two workers with the fake engine, and streams of 30 tokens/s that are in the
middle of their answers. One of the workers is struck; what counts is the longest time between two
tokens of the streams that it ran, over all of them and all rounds. The lease is 2 s.
"""

import argparse
import asyncio
import signal
import tempfile
from itertools import pairwise
from pathlib import Path

import httpx
from tests.support.faults import LEASE_S, Watched, prompt, submit, watch
from tests.support.local_fleet import LocalFleet
from tests.support.store import Store

from benchmarks.support.report import Row, finish

STREAMS, RATE, TOKENS, STRUCK_AT = 8, 30, 180, 30
BOUND_S = 60.0  # on hangs


async def longest_gap(fleet: LocalFleet, number: signal.Signals) -> float:
    """Strike a worker that runs all streams, once another is there; seconds."""
    pod, victim = await asyncio.gather(fleet.api(), fleet.worker())
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=pod.url, timeout=BOUND_S, limits=limits) as http:
        streams: list[Watched] = []
        for _ in range(STREAMS):
            stream = watch(http, await submit(http, prompt(tokens=TOKENS, rate=RATE)))
            streams.append(await stream.__aenter__())
        await fleet.worker()
        await asyncio.gather(*(stream.upto(STRUCK_AT) for stream in streams))
        victim.signal(number)
        await asyncio.gather(*(stream.end() for stream in streams))
    return max(later - earlier for stream in streams for earlier, later in pairwise(stream.times))


async def measure(number: signal.Signals) -> float:
    """The same on a fleet of its own."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store")
        try:
            async with (
                LocalFleet(store.url, Path(folder), lease_s=LEASE_S) as fleet,
                asyncio.timeout(BOUND_S),
            ):
                return await longest_gap(fleet, number)
        finally:
            store.end()


async def run(rounds: int) -> list[Row]:
    """Both, as often as asked for."""
    rows: list[Row] = []
    for name, number in (("kill -9", signal.SIGKILL), ("SIGTERM", signal.SIGTERM)):
        gaps = [await measure(number) for _ in range(rounds)]
        rows.append(Row("millstream", name, {"gap_s": max(gaps), "lease_s": LEASE_S}))
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    return finish("gaps", asyncio.run(run(options.rounds)), json_to=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
