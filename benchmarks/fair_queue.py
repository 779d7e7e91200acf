"""What two callers get of a fleet that both ask for more than it has, one ten times as much.

    python -m benchmarks.fair_queue [--seconds 60] [--one-caller] [--json FILE]

A pod and a worker of 4 slots with the fake engine, 20 tokens/s each. First both callers keep tasks
waiting, 100 and 10 of them: the shares of tokens should be equal. Then the light one has a single
task at a time: how long does it wait? `--one-caller` gives both one key, so that first in is first
out: that is what to compare with. Tasks take a second, so that ten clients can ask faster than they
are served: who does not wait has no share.
"""

import argparse
import asyncio
import itertools
import tempfile
import time
from pathlib import Path

import httpx
from tests.support.local_fleet import LocalFleet
from tests.support.store import Store

from benchmarks.support.report import Row, finish

TOKENS = 20
HEAVY, LIGHT = 100, 10
WARM_UP_S = 5.0


async def ask(http: httpx.AsyncClient) -> tuple[float, float]:
    """One task: when it ended, by this clock, and how long it waited, by the fleet's."""
    body = {"prompt": f'@fake {{"tokens": {TOKENS}}}\nhello', "max_tokens": TOKENS}
    task_id = (await http.post("/tasks", json=body)).raise_for_status().json()["task_id"]
    async with http.stream("GET", f"/tasks/{task_id}/stream") as events:
        async for _ in events.aiter_raw():
            pass
    ended = time.monotonic()
    task = (await http.get(f"/tasks/{task_id}")).raise_for_status().json()
    return ended, task["started_at"] - task["created_at"]


async def keep(http: httpx.AsyncClient, clients: int, until: float) -> list[tuple[float, float]]:
    """So many clients, each with one task after the other."""

    async def one() -> list[tuple[float, float]]:
        done: list[tuple[float, float]] = []
        while time.monotonic() < until:
            done.append(await ask(http))
        return done

    return list(itertools.chain(*await asyncio.gather(*(one() for _ in range(clients)))))


def percentile(values: list[float], at: float) -> float:
    """The value that so many per cent do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * at / 100))]


async def measure(url: str, keys: tuple[str, str], seconds: float) -> list[Row]:
    """Both phases."""

    def client(key: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=120,
            limits=httpx.Limits(max_connections=None),
        )

    rows: list[Row] = []
    async with client(keys[0]) as heavy, client(keys[1]) as light:
        for clients in (LIGHT, 1):
            begin = time.monotonic() + WARM_UP_S
            end = begin + seconds
            many, few = await asyncio.gather(keep(heavy, HEAVY, end), keep(light, clients, end))
            tokens = [
                TOKENS * sum(begin <= ended < end for ended, _ in done) for done in (many, few)
            ]
            waits = [wait for ended, wait in few if begin <= ended < end]
            figures = {
                "heavy_tokens": tokens[0],
                "light_tokens": tokens[1],
                "share": tokens[1] / sum(tokens),
                "light_waited_p50_s": percentile(waits, 50),
                "light_waited_p99_s": percentile(waits, 99),
            }
            rows.append(Row("millstream", f"{clients} tasks beside {HEAVY}", figures))
    return rows


async def run(options: argparse.Namespace) -> list[Row]:
    """Start the fleet and measure."""
    keys = "heavy-" + "a" * 24, "light-" + "b" * 24
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store")
        settings = {
            "api_keys": f"heavy:{keys[0]},light:{keys[1]}",
            "max_concurrent": 4,
            "fake_tokens_per_s": 20,
        }
        try:
            async with LocalFleet(store.url, Path(folder), **settings) as fleet:
                pod, _ = await asyncio.gather(fleet.api(), fleet.worker())
                asking = keys[:1] * 2 if options.one_caller else keys
                return await measure(pod.url, asking, options.seconds)
        finally:
            store.end()


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="of each phase")
    parser.add_argument("--one-caller", action="store_true", help="the same key for both")
    parser.add_argument("--json", default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    return finish("fair_queue", asyncio.run(run(options)), json_to=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
