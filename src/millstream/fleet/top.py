"""`millstream top`: the fleet, live, in a terminal."""

import asyncio
import json
import sys
import time
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from millstream.fleet.client import FleetClient, Refusal, Unreachable, fleet_url, open_client
from millstream.shared.settings import Settings

LOOK_S = 1.0
_STYLES = {"ready": "green", "starting": "dim", "draining": "yellow", "stalled": "red"}


def draw(fleet: dict[str, Any], url: str, now: float) -> Group:
    """What is seen of `/fleet.json`."""
    models, workers, apis, store = (fleet[part] for part in ("models", "workers", "apis", "redis"))
    ready = sum(worker["state"] == "ready" for worker in workers)
    head = Text.assemble(
        ("Millstream ", "bold"),
        url,
        f"   {_figure(sum(model['tokens_per_s'] for model in models))} tokens/s",
        f"   {sum(model['running'] for model in models)} running",
        f"   {sum(model['waiting'] for model in models)} waiting",
        f"   {ready}/{len(workers)} workers",
        f"   {store.get('name', 'Redis')} {store['version']}",
        f", {store['used_memory'] / 2**20:.1f} MB",
    )
    of_models = _table("MODEL", "WAITING", "RUNNING", "LONGEST WAIT", "TOKENS/S")
    for model in models:
        of_models.add_row(
            Text(model["name"]),
            str(model["waiting"]),
            str(model["running"]),
            f"{model['oldest_wait_s']:.1f} s",
            _figure(model["tokens_per_s"]),
        )
    of_workers = _table("WORKER", "MODEL", "STATE", "SLOTS", "TOKENS/S", "TAKEN OVER", "UP")
    for worker in workers:
        state = worker["state"]
        note = f" {worker['note']}" if worker.get("note") else ""
        of_workers.add_row(
            Text(worker["id"]),
            Text(worker["model"]),
            Text(state + note, _STYLES.get(state, "")),
            _bar(worker["running"], worker["slots"]),
            _figure(worker["tokens_per_s"]),
            str(worker["attempts_reclaimed"]),
            _duration(now - worker["started_at"]) if worker.get("started_at") else "",
        )
    of_apis = _table("POD", "ADDRESS", "STREAMS")
    for api in apis:
        of_apis.add_row(Text(api["id"]), Text(api["url"]), str(api["streams"]))
    return Group(head, Text(), of_models, Text(), of_workers, Text(), of_apis)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 3, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _bar(used: int, slots: int, width: int = 10) -> Text:
    filled = min(width, -(-used * width // max(slots, 1)))
    return Text.assemble(
        ("█" * filled, "cyan"), ("░" * (width - filled), "dim"), f" {used}/{slots}"
    )


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


async def _watch(client: FleetClient, settings: Settings) -> None:
    url = fleet_url(settings)
    last: Group | None = None
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            try:
                last = draw(await client.get("/fleet.json"), url, time.time())
                live.update(last, refresh=True)
            except Unreachable as error:
                live.update(_troubled(error.message, last), refresh=True)
            except Refusal as error:
                if not error.passing:
                    raise
                live.update(_troubled(error.message, last), refresh=True)
            await asyncio.sleep(LOOK_S)


def _troubled(message: str, last: Group | None) -> Group:
    return Group(Text(message, "red"), Text(), last if last is not None else Text())


async def _show(settings: Settings, *, once: bool, as_json: bool) -> int:
    async with open_client(settings) as client:
        if as_json:
            click.echo(json.dumps(await client.get("/fleet.json"), indent=2))
        elif once or not sys.stdout.isatty():
            fleet = await client.get("/fleet.json")
            # A pipe is as wide as what is written to it.
            console = Console(width=None if sys.stdout.isatty() else 160)
            console.print(draw(fleet, fleet_url(settings), time.time()))
        else:
            await _watch(client, settings)
    return 0


def run(settings: Settings, *, once: bool, as_json: bool) -> int:
    """Show the fleet until Ctrl-C, or once."""
    try:
        return asyncio.run(_show(settings, once=once, as_json=as_json))
    except KeyboardInterrupt:
        return 0
