"""Drives the load: an open loop (requests come when they come) or a closed one (so many open)."""

import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import httpx2

from millstream import __version__
from millstream.fleet.bench.arrivals import Arrivals
from millstream.fleet.bench.plot import page
from millstream.fleet.bench.request import Outcome, ask_chat
from millstream.fleet.bench.summary import summarize, table
from millstream.fleet.bench.workload import Ask, Mix, draw
from millstream.fleet.client import fleet_url, open_client
from millstream.fleet.screen import Screen
from millstream.shared.errors import MillstreamError
from millstream.shared.settings import Settings

_PROGRESS_S = 0.5
_LINE_S = 10.0
"""Between lines of progress where none can move: on a pipe, in a log."""
_ANSWER_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What is asked of the fleet."""

    model: str | None
    count: int
    at_once: int
    arrivals: Arrivals
    mixes: Sequence[Mix]
    temperature: float
    warmups: int
    seed: int
    json_file: Path | None
    html_file: Path | None


def run(settings: Settings, options: BenchOptions) -> int:
    """Put the load on, print what came of it, and write it down; 1 if all requests failed."""
    screen = Screen()
    try:
        figures = asyncio.run(_bench(settings, options, screen))
    finally:
        screen.close()
    return 0 if figures["completed"] else 1


async def _bench(settings: Settings, options: BenchOptions, screen: Screen) -> dict[str, Any]:
    model, fake = await _model(settings, options.model)
    rng = random.Random(options.seed)  # noqa: S311 - a load that can be repeated, no secret
    asks = draw(options.mixes, options.count, rng, fake=fake)
    delays = list(options.arrivals.delays(options.count, rng))
    setup = {
        "millstream": __version__,
        "url": fleet_url(settings),
        "model": model,
        "num_prompts": options.count,
        "max_concurrency": options.at_once,
        "temperature": options.temperature,
        "seed": options.seed,
        "arrivals": {
            k: str(v) if v == math.inf else v for k, v in asdict(options.arrivals).items()
        },
        "mixes": [asdict(mix) for mix in options.mixes],
    }
    key = settings.api_key.get_secret_value()
    async with httpx2.AsyncClient(
        base_url=fleet_url(settings),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx2.Timeout(_ANSWER_S, connect=10.0),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=options.at_once),
        trust_env=False,
    ) as http:

        async def ask(one: Ask) -> Outcome:
            return await ask_chat(http, one, model=model, temperature=options.temperature)

        load = (
            f"{options.count} requests for {model} at {fleet_url(settings)}, "
            f"{min(options.at_once, options.count)} at once at the most"
        )
        if screen.moving:
            screen.working(f"{load}: warming up")
        else:
            screen.warn(load)
        for warmup in draw(options.mixes, options.warmups, rng, fake=fake):
            await ask(warmup)
        start = time.monotonic()
        outcomes = await _drive(ask, asks, delays, options.at_once, screen)
        duration = time.monotonic() - start
    screen.working("")
    figures = summarize(outcomes, duration)
    click.echo(table(figures))
    if options.json_file:
        options.json_file.write_text(json.dumps({**setup, **figures}, indent=2) + "\n", "utf-8")
    if options.html_file:
        options.html_file.write_text(page(outcomes, figures, setup, start), "utf-8")
    return figures


async def _model(settings: Settings, name: str | None) -> tuple[str, bool]:
    """The model to ask, and whether the fake engine runs it."""
    async with open_client(settings) as client:
        names = [model["id"] for model in (await client.get("/v1/models"))["data"]]
        if name is None and len(names) != 1:
            raise MillstreamError(
                f"name a model: {', '.join(names)}" if names else "no model is served yet"
            )
        chosen = name or names[0]
        workers = (await client.get("/fleet.json"))["workers"]
        return chosen, any(
            worker["engine"] == "fake" for worker in workers if worker["model"] == chosen
        )


async def _drive(
    ask: Any, asks: Sequence[Ask], delays: Sequence[float], at_once: int, screen: Screen
) -> list[Outcome]:
    """Ask all; an open loop does not wait for answers, but never has more than `at_once` open."""
    room = asyncio.Semaphore(at_once)
    outcomes: list[Outcome] = []

    async def one(item: Ask) -> None:
        try:
            outcomes.append(await ask(item))
        finally:
            room.release()

    async def tell() -> None:
        show, every_s = (screen.working, _PROGRESS_S) if screen.moving else (screen.warn, _LINE_S)
        while True:
            await asyncio.sleep(every_s)
            show(f"{len(outcomes)} of {len(asks)} requests answered")

    telling = asyncio.create_task(tell())
    try:
        async with asyncio.TaskGroup() as group:
            due = time.monotonic()
            for item, delay in zip(asks, delays, strict=True):
                await asyncio.sleep(due - time.monotonic())
                await room.acquire()
                group.create_task(one(item))
                due += delay
    finally:
        telling.cancel()
    return outcomes
