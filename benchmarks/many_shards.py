"""What shards cost the first token of a fleet that works at two thirds of its slots.

    python -m benchmarks.many_shards [--shards 1 4 16] [--json FILE]

For each number of shards a fleet of its own on one Valkey: a pod, and three workers with three
slots of the fake engine. Chats of 2 to 18 tokens come at random moments, whatever was answered
before (an open load), in blocks: the fleets take turns, each with the same moments and lengths.
"""

import argparse
import asyncio
import random
import time
from contextlib import ExitStack

import redis.asyncio
import uvloop

from benchmarks.support.lean_http import asked
from benchmarks.support.processes import Started, pod, valkey, worker
from benchmarks.support.report import Row, finish

WORKERS, SLOTS = 3, 3
TOKENS, TOKENS_PER_S = (2, 18), 20
CHATS_PER_S = 12.0
BLOCK_S = 5.0
READY_S = 20.0
LATE_MS = 100.0


class Fleet:
    """A fleet that is up, and what its chats have seen."""

    def __init__(self, stack: ExitStack, shards: int) -> None:
        settings = {"shards": shards, "fake_tokens_per_s": TOKENS_PER_S}
        self.store = stack.enter_context(valkey())
        self._pod: Started = stack.enter_context(pod(self.store, **settings))
        for _ in range(WORKERS):
            stack.enter_context(worker(self.store, max_concurrent=SLOTS, **settings))
        self.first_ms: list[float] = []
        self.scripts = 0
        self.store_s = 0.0

    async def wait_until_ready(self) -> None:
        """Return when a chat has been answered."""
        async with asyncio.timeout(READY_S):
            while True:
                async with asked(self._pod.port, "/ready") as answer:
                    if answer.status == 200:
                        break
                await asyncio.sleep(0.1)
            await asyncio.gather(*(self._chat(TOKENS[0]) for _ in range(WORKERS * SLOTS)))
        self.first_ms.clear()

    async def block(self, seed: int) -> None:
        """Chats for a while, and their ends."""
        rolls = random.Random(seed)
        before, used = await self._script_calls(), self.store.cpu_s()
        end = time.monotonic() + BLOCK_S
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < end:
                group.create_task(self._chat(rolls.randint(*TOKENS)))
                await asyncio.sleep(rolls.expovariate(CHATS_PER_S))
        self.scripts += await self._script_calls() - before
        self.store_s += self.store.cpu_s() - used

    async def _script_calls(self) -> int:
        async with redis.asyncio.Redis.from_url(self.store.url) as client:
            stats = await client.info("commandstats")
        return stats["cmdstat_evalsha"]["calls"]

    async def _chat(self, tokens: int) -> None:
        body = {
            "messages": [{"role": "user", "content": f'@fake {{"tokens": {tokens}}}\nx'}],
            "stream": True,
        }
        began, first = time.monotonic(), 0.0
        async with asked(self._pod.port, "/v1/chat/completions", body) as answer:
            async for frames in answer.frames():
                if not first and any(b'"delta":{"content":' in frame for frame in frames):
                    first = time.monotonic()
        if not first:
            raise RuntimeError("a chat had no token")
        self.first_ms.append((first - began) * 1e3)

    def figures(self) -> dict[str, float]:
        """Of all chats so far."""
        times = sorted(self.first_ms)
        return {
            "chats": len(times),
            "first_p50_ms": times[len(times) // 2],
            "first_p90_ms": times[len(times) * 9 // 10],
            "first_p99_ms": times[len(times) * 99 // 100],
            f"later_than_{LATE_MS:.0f}_ms": sum(each > LATE_MS for each in times),
            "scripts_a_chat": self.scripts / len(times),
            "valkey_ms_a_chat": self.store_s / len(times) * 1e3,
        }


async def run(options: argparse.Namespace) -> list[Row]:
    """All fleets in turns."""
    with ExitStack() as stack:
        fleets = {shards: Fleet(stack, shards) for shards in options.shards}
        for fleet in fleets.values():
            await fleet.wait_until_ready()
        for number in range(options.rounds):
            for fleet in fleets.values():
                await fleet.block(number)
        return [
            Row("millstream", f"{shards} shards", fleet.figures())
            for shards, fleet in fleets.items()
        ]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shards", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    return finish("many_shards", uvloop.run(run(options)), json_to=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
