"""Whether a fleet that works for an hour stays as it was: memory, keys, and how late tokens come.

    python -m benchmarks.long_run [--seconds 3600] [--json FILE]

Two pods, two workers with the fake engine and one with the bundled model, on a Valkey that is set
up as the embedded one. The fake workers have 16 slots each, of 30 tokens/s; 16 clients ask for one
answer of 10 to 200 tokens after the other, in every form (`support/half_load.py`), so half of the
slots are taken all the time. The real model makes 40 sampled tokens now and then.

The run has twelve windows. Results live for two minutes (`RESULT_TTL_S`), so that what is stored
has levelled off by the second quarter, with which the last one is compared: the median of each
process's memory must be the same within 5 %, and the 99th percentiles within 25 %, or a
millisecond. What Valkey says that its data take is judged too, without tombs and idempotency keys,
which live for a day: they are told apart. No request may fail, and no key may be without a time to
live. The exit code is 1 where it is otherwise.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop
from tests.support.local_fleet import LocalFleet

from benchmarks.support.fleet_samples import (
    key_kinds,
    process_figures,
    store_figures,
    streams_open,
)
from benchmarks.support.half_load import REAL, Clients
from benchmarks.support.processes import Valkey, valkey
from benchmarks.support.report import about
from benchmarks.support.tally import Tally

WINDOWS = 12
SECOND, LAST = slice(3, 6), slice(9, 12)
"""The quarters that are compared."""
SAMPLES_S = 15.0
SLOTS, STREAMS, TOKENS_PER_S = 16, 16, 30
REAL_MODEL, REAL_EVERY_S = "smollm2-135m-instruct", 10.0
FOR_A_DAY = ("tombs", "idem")
MEMORY_WITHIN, LATENESS_WITHIN, LATENESS_MS = 0.05, 0.25, 1.0
SETTINGS = {"lease_s": 10, "result_ttl_s": 120, "fake_tokens_per_s": TOKENS_PER_S}


class LongRun:
    """A fleet that is up, and what was seen of it so far."""

    def __init__(self, fleet: LocalFleet, store: Valkey, pods: dict[str, str]) -> None:
        self._redis = fleet.redis
        self._ports = [urlsplit(url).port or 0 for url in pods.values()]
        self._pids = {"valkey": store.popen.pid}
        names = [*pods, "worker fake 1", "worker fake 2", "worker real"]
        self._pids |= {
            name: process.pid for name, process in zip(names, fleet.processes, strict=True)
        }
        self.tally = Tally(apart=REAL)
        self.clients = Clients(self._ports, self.tally, seed=1)
        self.windows: list[dict[str, Any]] = []

    async def watch(self, seconds: float) -> None:
        """Look at everything until the last window is over."""
        began = time.monotonic()
        for number in range(1, WINDOWS + 1):
            until = began + number * seconds / WINDOWS
            samples: list[dict[str, Any]] = []
            while time.monotonic() < until or not samples:
                samples.append(await self._sample())
                await asyncio.sleep(max(0.0, min(SAMPLES_S, until - time.monotonic())))
            kinds = await key_kinds(self._redis)
            window = {
                "number": number,
                "samples": samples,
                "kinds": {name: asdict(kind) | {"mb": kind.mb} for name, kind in kinds.items()},
                "load": self.tally.close(),
            }
            self.windows.append(window)
            print(_line(window), flush=True)

    async def _sample(self) -> dict[str, Any]:
        return {
            "at": time.monotonic(),
            "processes": await asyncio.to_thread(process_figures, self._pids),
            "store": await store_figures(self._redis),
            "streams": await streams_open(self._ports),
        }

    def judged(self) -> list[dict[str, Any]]:
        """Each figure that must be flat: in the second quarter, in the last, and whether it is."""
        rows: list[dict[str, Any]] = []

        def judge(what: str, read: Callable[[dict[str, Any]], list[float]], within: float) -> None:
            before, after = (
                statistics.median(
                    [value for window in self.windows[part] for value in read(window)]
                )
                for part in (SECOND, LAST)
            )
            flat = abs(after - before) <= within * before
            late = what.endswith("ms")
            flat |= late and after - before <= LATENESS_MS
            rows.append({"what": what, "before": before, "after": after,
                         "ratio": after / before if before else 0.0, "flat": flat})  # fmt: skip

        for role in self._pids:
            judge(
                f"{role}, MB",
                lambda window, role=role: [
                    sample["processes"][role]["rss_mb"] for sample in window["samples"]
                ],
                MEMORY_WITHIN,
            )
        judge("valkey, without what lives a day, MB", _store_mb, MEMORY_WITHIN)
        for name in ("first_p99_ms", "gap_p99_ms"):
            judge(
                f"all forms, {name.replace('_', ' ')}",
                lambda window, name=name: [window["load"]["all"][name]],
                LATENESS_WITHIN,
            )
        compared = [*self.windows[SECOND], *self.windows[LAST]]
        always = set.intersection(*(set(window["load"]["forms"]) for window in compared))
        for form in sorted(always - {REAL}):
            judge(
                f"{form}, gap p99 ms",
                lambda window, form=form: [window["load"]["forms"][form]["gap_p99_ms"]],
                LATENESS_WITHIN,
            )
        return rows


def _store_mb(window: dict[str, Any]) -> list[float]:
    a_day = sum(window["kinds"].get(kind, {"mb": 0.0})["mb"] for kind in FOR_A_DAY)
    stores = [sample["store"] for sample in window["samples"]]
    return [store["used_mb"] - store["tables_mb"] - a_day for store in stores]


def _line(window: dict[str, Any]) -> str:
    """A window in a line."""
    first, last, load = window["samples"][0], window["samples"][-1], window["load"]
    cpu_s = [sum(role["cpu_s"] for role in at["processes"].values()) for at in (first, last)]
    cores = (cpu_s[1] - cpu_s[0]) / max(last["at"] - first["at"], SAMPLES_S)
    memory = " ".join(
        f"{role} {figures['rss_mb']:.1f}/{figures['threads']:.0f}/{figures['files']:.0f}"
        for role, figures in last["processes"].items()
    )
    store, times = last["store"], load["all"]
    return (
        f"{window['number']:2}: {sum(load['requests'].values())} requests, "
        f"{sum(load['tokens'].values())} tokens, {last['streams']} streams open, "
        f"{cores:.2f} cores; first token "
        f"{times['first_p50_ms']:.1f}/{times['first_p99_ms']:.1f} ms, "
        f"gap {times['gap_p50_ms']:.1f}/{times['gap_p99_ms']:.1f} ms; MB/threads/files: {memory}; "
        f"store {store['used_mb']:.1f} MB, {_store_mb(window)[-1]:.1f} without what lives a day, "
        f"{store['keys']} keys, file {store['file_mb']:.1f} MB, {store['rewrites']} rewrites"
    )


async def run(seconds: float) -> tuple[LongRun, list[str]]:
    """Start the fleet, keep it busy and watch it; what came of it, and what is wrong."""
    with valkey() as store, tempfile.TemporaryDirectory() as folder:
        async with LocalFleet(store.url, Path(folder), **SETTINGS) as fleet:
            pods = {f"pod {number}": (await fleet.api()).url for number in (1, 2)}
            for _ in range(2):
                await fleet.worker(max_concurrent=SLOTS)
            await fleet.worker(engine="transformers", max_concurrent=4, within_s=120)
            long = LongRun(fleet, store, pods)
            asking = [long.clients.keep_asking() for _ in range(STREAMS)]
            asking.append(long.clients.keep_asking_real(REAL_MODEL, REAL_EVERY_S))
            async with asyncio.TaskGroup() as group:  # a fault in one of them ends the run
                tasks = [group.create_task(client) for client in asking]
                await long.watch(seconds)
                for task in tasks:
                    task.cancel()
    wrong = [f"{count} times {kind}" for kind, count in long.tally.errors.items()]
    wrong += [
        f"{kind['without_end']} keys `{name}` without a time to live"
        for name, kind in long.windows[-1]["kinds"].items()
        if kind["without_end"]
    ]
    return long, wrong


def main(arguments: list[str] | None = None) -> int:
    """Run, print tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600, help="of all windows together")
    parser.add_argument("--json", default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    long, wrong = uvloop.run(run(options.seconds))
    rows = long.judged()
    print(f"\n{about()}\n\nsecond quarter → last quarter")
    for row in rows:
        print(f"{row['what']:45} {row['before']:9.2f} {row['after']:9.2f} {row['ratio']:6.3f} "
              f"{'flat' if row['flat'] else 'NOT FLAT'}")  # fmt: skip
    print("\nkeys at the end: number, bytes each, MB, without a time to live")
    for name, kind in long.windows[-1]["kinds"].items():
        print(f"{name:12} {kind['count']:7} {kind['key_bytes']:8.0f} {kind['mb']:8.2f} "
              f"{kind['without_end']:4}")  # fmt: skip
    wrong += [f"{row['what']} is not flat" for row in rows if not row["flat"]]
    print("\n" + ("\n".join(wrong) or "all flat, nothing failed, every key has a time to live"))
    if options.json:
        told = {**about(), "windows": long.windows, "judged": rows, "wrong": wrong}
        Path(options.json).write_text(json.dumps(told, indent=1), "utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
