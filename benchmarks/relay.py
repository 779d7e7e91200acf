"""What it costs to bring tokens from a worker to readers, and how long it takes.

    python -m benchmarks.relay [--quick] [--no-peers] [--json FILE]

A Valkey with its log on disk, one API pod, readers in a process of their own, and a synthetic
worker in this one, which writes by the real scripts. Costs are CPU time, not wall time, so that
others who use the machine weigh little; medians over the rounds.

- `paced`: 100 chats with 30 tokens/s, each written by itself; the only case that tells latencies.
- `in step`: the next step is written when all readers have the last one: a token, a write.
- `8 behind`: the same with 8 tokens a step and stream.
- `flood`: as fast as the worker writes.
- `from the log`: readers of tasks whose text is in the log already.
- `of many`: 8 behind for 200 streams, alone and while thousands of others wait.
- `idle`: memory of streams whose task waits.

"A send" is what the kernel alone takes for a piece: no relay in step can be cheaper.
The gateways among the peers keep nothing: they pass on what a fake OpenAI server sends, whose cost
does not count. The usual relays have `EventSourceResponse` and a connection to a Valkey for each
stream, which subscribes to what is published, or reads what is kept in a Redis stream.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio
import uvloop
from tests.support.ports import free_port

from benchmarks.support import peers
from benchmarks.support.crowd import chat, crowd, get
from benchmarks.support.floor import send_us
from benchmarks.support.processes import ROOT, Started, pod, started, valkey
from benchmarks.support.report import Row, finish
from benchmarks.support.writer import Writer, evenly, open_writer
from millstream.api.streams import FAR_HINT_S

PACED, RATE = 100, 30
FLOODED = 200  # streams of a peer
CONNECTED = 1000  # streams that wait, each with a connection to the store
LOG_TOKENS, LOG_READERS = 500, 100
CASE_S = 240.0  # a bound on hangs


@dataclass
class Rig:
    """Millstream: what a case runs on."""

    store: Started
    pod: Started
    writer: Writer
    seconds: float


class Clock:
    """CPU per token between two moments."""

    def __init__(self, pod: Started, store: Started) -> None:
        self._pod = pod
        self._store = store
        self._before = self._spent()
        self._began = time.monotonic()

    def _spent(self) -> tuple[float, float, float]:
        """CPU seconds of pod, Valkey and worker so far."""
        return self._pod.cpu_s(), self._store.cpu_s(), time.process_time()

    def per_token(self, tokens: float) -> dict[str, float]:
        """µs a token in each process."""
        after = self._spent()
        pod, store, worker = (
            (b - a) / tokens * 1e6 for a, b in zip(self._before, after, strict=True)
        )
        return {
            "pod_us_per_token": pod,
            "tokens_per_core_s": 1e6 / pod,
            # A share of a core, at 10,000 tokens/s.
            "valkey_percent_at_10k": store,
            "worker_us_per_token": worker,
            "tokens_per_s": tokens / (time.monotonic() - self._began),
        }


async def paced(rig: Rig) -> dict[str, float]:
    """Tokens by themselves."""
    async with crowd(rig.pod.port, [chat("x")] * PACED) as readers:
        await rig.writer.claim(PACED)
        await rig.writer.pace(RATE, 0.5)
        await readers.report()
        clock = Clock(rig.pod, rig.store)
        await rig.writer.pace(RATE, rig.seconds)
        told = await readers.report()
        costs = clock.per_token(told["tokens"])
        return costs | {"p50_ms": told["p50_ms"], "p99_ms": told["p99_ms"]}


async def stepped(rig: Rig, streams: int, tokens: int) -> dict[str, float]:
    """The next step is written when all readers have the last one."""
    size = streams * tokens
    async with crowd(rig.pod.port, [chat("x")] * streams, step=size) as readers:
        await rig.writer.claim(streams)

        async def steps(count: int) -> None:
            for _ in range(count):
                await rig.writer.step(tokens)
                await readers.line()

        await steps(3)
        began = time.monotonic()
        await steps(2)
        count = max(3, round(rig.seconds / ((time.monotonic() - began) / 2)))
        clock = Clock(rig.pod, rig.store)
        await steps(count)
        return clock.per_token(count * size)


async def flood(rig: Rig, streams: int) -> dict[str, float]:
    """As fast as it goes; the readers may be behind."""
    async with crowd(rig.pod.port, [chat("x")] * streams, step=streams) as readers:
        await rig.writer.claim(streams)
        await rig.writer.step()
        await readers.line()
        clock = Clock(rig.pod, rig.store)
        count, until = 0, time.monotonic() + rig.seconds
        while time.monotonic() < until:
            await rig.writer.step()
            count += 1
        for _ in range(count):
            await readers.line()
        return clock.per_token(count * streams)


async def from_the_log(rig: Rig) -> dict[str, float]:
    """Readers that begin behind."""
    task_ids = await rig.writer.submit(LOG_READERS)
    await rig.writer.claim(LOG_READERS)
    for _ in range(LOG_TOKENS // 50):
        await rig.writer.step(50)
    await rig.writer.step(0, end=True)
    size = LOG_READERS * LOG_TOKENS
    clock = Clock(rig.pod, rig.store)
    async with crowd(rig.pod.port, [*map(native, task_ids)], step=size) as readers:
        await readers.line()
        return clock.per_token(size)


def native(task_id: str) -> str:
    """The request for a task's own stream."""
    return get(f"/tasks/{task_id}/stream")


async def idle(pod: Started, requests: Sequence[str]) -> float:
    """MB of the pod for 1,000 streams that wait."""
    few = len(requests) // 5
    async with crowd(pod.port, requests[:few]):  # pools and buffers grow once
        before = pod.memory_mb()
        async with crowd(pod.port, requests[few:]):
            return (pod.memory_mb() - before) / (len(requests) - few) * 1000


async def of_many(rig: Rig, streams: int) -> dict[str, float]:
    """What a token costs with so many other streams open, over what it costs with none.

    They are told their place in the queue every ten seconds, token or no token: that is told apart.
    """
    alone = (await stepped(rig, FLOODED, 8))["pod_us_per_token"]
    # Of another model, or the writer would be given them.
    others = [*map(native, await rig.writer.submit(streams, model="n"))]
    async with crowd(rig.pod.port, others):
        before, began = rig.pod.cpu_s(), time.monotonic()
        await asyncio.sleep(FAR_HINT_S)
        waiting = (rig.pod.cpu_s() - before) / (time.monotonic() - began)
        told = await stepped(rig, FLOODED, 8)
    among = told["pod_us_per_token"] - 1e6 * waiting / told["tokens_per_s"]
    return {
        "pod_us_per_token": among,
        "alone_us_per_token": alone,
        "ratio": among / alone,
        "waiting_percent_of_a_core": 100 * waiting,
    }


async def waiting_tasks(rig: Rig, streams: int) -> dict[str, float]:
    """Each task's own stream, which tells its place in the queue."""
    requests = [*map(native, await rig.writer.submit(streams))]
    return {"mb_per_1000": await idle(rig.pod, requests)}


async def waiting_chats(rig: Rig, streams: int) -> dict[str, float]:
    """OpenAI's form."""
    return {"mb_per_1000": await idle(rig.pod, [chat("x")] * streams)}


async def usual(way: str, seconds: float) -> dict[str, dict[str, float]]:
    """A usual relay: paced, in step, and memory of streams that wait."""
    module, port = "benchmarks.support.usual_relays", free_port()
    requests = [get(f"/{way}/{number}/stream") for number in range(CONNECTED)]
    with valkey() as store:
        command = [sys.executable, "-m", module, str(port), store.url]
        with started(command, port, cwd=ROOT) as app:
            async with redis.asyncio.Redis.from_url(store.url) as client:

                async def write(streams: Sequence[int]) -> None:
                    text = f"~{time.monotonic_ns():016d}"
                    async with client.pipeline(transaction=False) as pipe:
                        for stream in streams:
                            if way == "kept":
                                pipe.xadd(str(stream), {"data": text})
                            else:
                                pipe.publish(str(stream), text)
                        await pipe.execute()

                async with crowd(port, requests[:PACED]) as readers:
                    await evenly(write, [*range(PACED)], RATE, 0.5)
                    await readers.report()
                    clock = Clock(app, store)
                    await evenly(write, [*range(PACED)], RATE, seconds)
                    told = await readers.report()
                    evened = clock.per_token(told["tokens"])
                    evened |= {"p50_ms": told["p50_ms"], "p99_ms": told["p99_ms"]}
                await client.flushdb()
                async with crowd(port, requests[:FLOODED], step=FLOODED) as readers:
                    clock, count, until = None, 0, 0.0
                    while clock is None or time.monotonic() < until:
                        await write(range(FLOODED))
                        await readers.line()
                        count += 1
                        if clock is None:
                            clock, count = Clock(app, store), 0
                            until = time.monotonic() + seconds
                    in_step = clock.per_token(count * FLOODED)
                await client.flushdb()
            return {
                f"paced, {PACED} x {RATE}/s": evened,
                f"in step, {FLOODED}": in_step,
                "idle tasks": {"mb_per_1000": await idle(app, requests)},
            }


def cases(options: argparse.Namespace) -> dict[str, Callable[[Rig], Coroutine[Any, Any, Any]]]:
    """What is measured, by name."""
    crowds = [200] if options.quick else [50, 200, 1000]
    named: dict[str, Callable[[Rig], Coroutine[Any, Any, Any]]] = {"paced, 100 x 30/s": paced}
    for size in crowds:
        named[f"in step, {size}"] = lambda rig, size=size: stepped(rig, size, 1)
        named[f"8 behind, {size}"] = lambda rig, size=size: stepped(rig, size, 8)
        named[f"flood, {size}"] = lambda rig, size=size: flood(rig, size)
    named["from the log, 100 x 500"] = from_the_log
    waiting = options.idle
    if not options.quick:
        named[f"of many, 200 of {2 * waiting}"] = lambda rig: of_many(rig, 2 * waiting - FLOODED)
    named[f"idle tasks, {waiting}"] = lambda rig: waiting_tasks(rig, waiting)
    named[f"idle chats, {waiting}"] = lambda rig: waiting_chats(rig, waiting)
    return {name: case for name, case in named.items() if options.only in name}


async def measure(case: Callable[[Rig], Coroutine[Any, Any, Any]], seconds: float) -> Any:
    """A case on processes of its own."""
    with valkey() as store, pod(store) as served:
        async with open_writer(store.url) as writer, asyncio.timeout(CASE_S):
            return await case(Rig(store, served, writer, seconds))


async def run(options: argparse.Namespace) -> list[Row]:
    """All cases in turn, as many rounds as asked for, and the peers in between."""
    figures: defaultdict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    rivals, missing = ([], {}) if options.no_peers else peers.installed()
    for number in range(options.rounds):
        figures["the kernel", "a send"].append({"us": send_us()})
        for name, case in cases(options).items():
            if number and name.startswith(("idle", "of many")):
                continue  # the same each time, and it takes long
            print(f"round {number + 1}: {name}; load {os.getloadavg()[0]:.1f}", flush=True)
            figures["millstream", name].append(await measure(case, options.seconds))
        if not options.no_peers:
            for way, who in (("published", peers.SUBSCRIPTIONS), ("kept", peers.REDIS_STREAMS)):
                print(f"round {number + 1}: {who}; load {os.getloadavg()[0]:.1f}", flush=True)
                async with asyncio.timeout(CASE_S):
                    for name, values in (await usual(way, options.seconds)).items():
                        figures[who, name].append(values)
        for rival in rivals:
            if rival.title in missing:
                continue
            print(f"round {number + 1}: {rival.name}; load {os.getloadavg()[0]:.1f}", flush=True)
            try:
                told = await peers.measure(
                    rival, options.seconds, paced=(PACED, RATE), flooded=FLOODED
                )
            except (RuntimeError, TimeoutError) as error:
                missing[rival.title] = str(error)
                continue
            if not told:
                missing[rival.title] = "too slow for each of the cases"
            for name, values in told.items():
                figures[rival.title, name].append(values)
    rows = [
        Row(who, name, {key: statistics.median(one[key] for one in told) for key in told[0]})
        for (who, name), told in figures.items()
    ]
    return rows + [Row(who, "all", skipped=why) for who, why in missing.items()]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round of fewer cases")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=None, help="of each case")
    parser.add_argument("--idle", type=int, default=None, help="streams that wait")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.seconds = options.seconds or (1.5 if options.quick else 3.0)
    options.idle = options.idle or (1000 if options.quick else 5000)
    options.no_peers = options.no_peers or options.quick
    return finish("relay", uvloop.run(run(options)), json_to=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
