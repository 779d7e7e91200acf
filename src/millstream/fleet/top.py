"""`millstream top`: the fleet, live, in a terminal."""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from millstream.fleet.client import FleetClient, Refusal, Unreachable, fleet_url, open_client
from millstream.shared.cancellation import cancel_until_done
from millstream.shared.settings import Settings

LOOK_S = 1.0
NARROW = 110
"""Columns of a terminal below which something is left out: all of it with usual names takes so
many. What is then shown fits into 60."""
_WORKER = ("WORKER", "MODEL", "STATE", "SLOTS", "TOKENS/S", "TAKEN OVER", "UP")
_WORKER_NARROW = ("WORKER", "STATE", "SLOTS", "TOKENS/S", "UP")
_STYLES = {"ready": "green", "starting": "dim", "draining": "yellow", "stalled": "red"}


def draw(fleet: dict[str, Any], url: str, now: float, *, narrow: bool = False) -> Group:
    """What is seen of `/fleet.json`, or the most important of it."""
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
    of_models = [
        {
            "MODEL": Text(model["name"]),
            "WAITING": str(model["waiting"]),
            "RUNNING": str(model["running"]),
            "LONGEST WAIT": f"{model['oldest_wait_s']:.1f} s",
            "TOKENS/S": _figure(model["tokens_per_s"]),
        }
        for model in models
    ]
    of_workers = [_worker_cells(worker, now, bar=4 if narrow else 10) for worker in workers]
    of_apis = [
        {"POD": Text(api["id"]), "ADDRESS": Text(api["url"]), "STREAMS": str(api["streams"])}
        for api in apis
    ]
    gap = 1 if narrow else 3
    return Group(
        head,
        Text(),
        _table(("MODEL", "WAITING", "RUNNING", "LONGEST WAIT", "TOKENS/S"), of_models, gap),
        Text(),
        _table(_WORKER_NARROW if narrow else _WORKER, of_workers, gap),
        Text(),
        _table(("POD", "ADDRESS", "STREAMS"), of_apis, gap),
    )


def _worker_cells(worker: dict[str, Any], now: float, *, bar: int) -> dict[str, str | Text]:
    state = worker["state"]
    note = f" {worker['note']}" if worker.get("note") else ""
    return {
        "WORKER": Text(worker["id"]),
        "MODEL": Text(worker["model"]),
        "STATE": Text(state + note, _STYLES.get(state, "")),
        "SLOTS": _bar(worker["running"], worker["slots"], bar),
        "TOKENS/S": _figure(worker["tokens_per_s"]),
        "TAKEN OVER": str(worker["attempts_reclaimed"]),
        "UP": _duration(now - worker["started_at"]) if worker.get("started_at") else "",
    }


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, str | Text]], gap: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, gap, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    return table


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _bar(used: int, slots: int, width: int) -> Text:
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
    """Look once a second until `q` is pressed."""
    left = asyncio.Event()
    with Live(console=Console(), screen=True, auto_refresh=False) as live, _on_key("q", left.set):
        looking = asyncio.create_task(_look(client, fleet_url(settings), live))
        leaving = asyncio.create_task(left.wait())
        try:
            await asyncio.wait({looking, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_until_done([looking, leaving])
    if not looking.cancelled():
        looking.result()


async def _look(client: FleetClient, url: str, live: Live) -> None:
    last: Group | None = None
    while True:
        try:
            fleet = await client.get("/fleet.json")
            last = draw(fleet, url, time.time(), narrow=live.console.width < NARROW)
            live.update(Group(last, Text(), Text("q leaves", "dim")), refresh=True)
        except Unreachable as error:
            live.update(_troubled(error.message, last), refresh=True)
        except Refusal as error:
            if not error.passing:
                raise
            live.update(_troubled(error.message, last), refresh=True)
        await asyncio.sleep(LOOK_S)


@contextlib.contextmanager
def _on_key(key: str, pressed: Callable[[], object]) -> Generator[None]:
    """Call a function when a key is pressed; Ctrl-C stays what it is."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()

    def read() -> None:
        typed = os.read(terminal, 64)
        if not typed or key.encode() in typed.lower():  # nothing: nobody can type any more
            pressed()

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    loop = asyncio.get_running_loop()
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


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
            narrow = console.width < NARROW
            console.print(draw(fleet, fleet_url(settings), time.time(), narrow=narrow))
        else:
            await _watch(client, settings)
    return 0


def run(settings: Settings, *, once: bool, as_json: bool) -> int:
    """Show the fleet until `q` or Ctrl-C, or once."""
    try:
        return asyncio.run(_show(settings, once=once, as_json=as_json))
    except KeyboardInterrupt:
        return 0
