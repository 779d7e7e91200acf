"""Tokens/s, TTFT and ITL over HTTP: the fleet and its peers, against the engine by itself.

    python -m benchmarks.fleet_over_engine [--streams 1 4 16 32] [--no-peers] [--json FILE]

A pod and a worker with the bundled model, of its own, or an idle fleet that serves it (`--url`);
`transformers serve`, and the tutorials' app, with the same weights; and the fleet's engine in this
process, without HTTP. All do the same work in turns (greedy, the same prompts, the same number of
new tokens); medians over the rounds, and tokens/s over those of the engine by itself in the same
round. While one works the others are idle, but loaded: leave room for four copies of the model.
`others_percent` is what pod, store and clients take of the cores: where an engine keeps all of them
busy, it is what the ratio cannot but lack.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import torch
from tests.support.local_fleet import LocalFleet
from tests.support.store import Store

from benchmarks.support.alone import PROMPTS, Alone
from benchmarks.support.asker import Asker, asker
from benchmarks.support.crowd import post
from benchmarks.support.processes import cpu_s
from benchmarks.support.report import Row, finish
from benchmarks.support.servers import SERVERS, serving
from millstream.worker.engines.model_source import bundled_file
from millstream.worker.engines.transformers_gguf import unpacked

LOAD_S = 120.0
ALONE = "the engine alone"


@dataclass
class Run:
    """One round: tokens/s over all streams, medians of the first wait and of those after it."""

    tokens_per_s: float
    ttft_ms: float
    itl_ms: float
    others_percent: float | None = None
    """Of all cores' time, what pod, store and clients took."""


@dataclass
class Contestant:
    """Who takes part: how many streams at most, and how it does a round of (streams, tokens)."""

    name: str
    most_streams: int
    round: Callable[[int, int], Awaitable[Run]]


class Server:
    """What answers over HTTP.

    Args:
        url: Where.
        model: What it calls the model.
        pids: The processes whose CPU is missing where the engine is.
    """

    def __init__(
        self, clients: Asker, url: str, *, model: str = "bundled", pids: Sequence[int] = ()
    ) -> None:
        self._clients = clients
        self._address = urlsplit(url)
        self._model = model
        self._pids = pids

    async def round(self, streams: int, tokens: int) -> Run:
        """All at once, to their ends."""
        requests = [
            post(
                "/v1/chat/completions",
                {
                    "model": self._model,
                    "messages": [{"role": "user", "content": prompt}],
                    "max_tokens": tokens,
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                },
            )
            for prompt in PROMPTS[:streams]
        ]
        before = sum(map(cpu_s, self._pids))
        answer = await self._clients.ask(
            self._address.hostname or "127.0.0.1", self._address.port or 80, requests
        )
        spent = sum(map(cpu_s, self._pids)) - before + answer.cpu_s
        first = statistics.median(answer.first_s)
        return Run(
            answer.tokens / answer.took_s,
            1000 * first,
            1000 * (answer.took_s - first) / max(1, answer.tokens / streams - 1),
            100 * spent / (answer.took_s * (os.cpu_count() or 1)) if self._pids else None,
        )


@asynccontextmanager
async def fleet(clients: Asker, options: argparse.Namespace) -> AsyncGenerator[Server]:
    """That one, or one that is started and ended here."""
    if options.url is not None:
        yield Server(clients, options.url)
        return
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store")
        settings = {"engine": "transformers", "model": "bundled", "model_source": "bundled"}
        settings |= {"dtype": options.dtype}
        try:
            async with LocalFleet(store.url, Path(folder), lease_s=10, **settings) as started:
                pod, _ = await asyncio.gather(started.api(), started.worker(within_s=LOAD_S))
                yield Server(clients, pod.url, pids=[pod.pid, store.popen.pid])
        finally:
            store.end()


@asynccontextmanager
async def contestants(options: argparse.Namespace) -> AsyncGenerator[list[Contestant]]:
    """All of them, started one after the other; the first is who the others are compared with."""
    async with AsyncExitStack() as stack:
        alone = await stack.enter_async_context(Alone(dtype=options.dtype))

        async def by_itself(streams: int, tokens: int) -> Run:
            told = await alone.stories(streams, tokens)
            return Run(told.tokens_per_s, told.ttft_ms, told.itl_ms)

        clients = await stack.enter_async_context(asker())
        ours = await stack.enter_async_context(fleet(clients, options))
        found = [Contestant(ALONE, 64, by_itself), Contestant("millstream", 64, ours.round)]
        if not options.peers:
            yield found
            return
        _, dtype, *_ = alone.numerics.split("/")
        dtype = "float32" if dtype == "int8" else dtype  # peers do not have it
        weights = unpacked(bundled_file(), getattr(torch, dtype), lambda _: None)
        folder = stack.enter_context(weights)
        for server in SERVERS:
            process = stack.enter_context(serving(server, folder, dtype))
            peer = Server(clients, f"http://127.0.0.1:{process.port}", model=str(folder))
            found.append(Contestant(server.name, server.most_streams, peer.round))
        yield found


async def run(options: argparse.Namespace) -> list[Row]:
    """All in turns, for each number of streams."""
    rows: list[Row] = []
    async with contestants(options) as all_of_them:
        for streams in options.streams:
            taking_part = [one for one in all_of_them if streams <= one.most_streams]
            for one in taking_part:
                await one.round(streams, 4)
            rounds = [
                {one.name: await one.round(streams, options.tokens) for one in taking_part}
                for _ in range(options.rounds)
            ]
            rows += [
                Row(one.name, f"{streams} streams", _figures(one.name, rounds))
                for one in taking_part
            ]
    return rows


def _figures(name: str, rounds: Sequence[dict[str, Run]]) -> dict[str, float]:
    """Medians of one contestant's rounds, and of their ratios."""
    own = [asdict(each[name]) for each in rounds]
    figures = {
        figure: statistics.median(one[figure] for one in own)
        for figure, value in own[0].items()
        if value is not None
    }
    if name != ALONE:
        figures["ratio"] = statistics.median(
            each[name].tokens_per_s / each[ALONE].tokens_per_s for each in rounds
        )
    return figures


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default=None, help="of a fleet that runs already")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 4, 16, 32])
    parser.add_argument("--dtype", default="auto", help="as MILLSTREAM_DTYPE")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="ours alone")
    parser.add_argument("--json", default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    return finish("fleet_over_engine", asyncio.run(run(options)), json_to=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
