"""What two callers get of a fleet that both ask for more than it has, one ten times as much.

    MILLSTREAM_API_KEYS=heavy:aaaaaaaaaaaaaaaaaaaaaaaa,light:bbbbbbbbbbbbbbbbbbbbbbbb \\
        MILLSTREAM_MAX_CONCURRENT=4 MILLSTREAM_FAKE_TOKENS_PER_S=20 millstream up --engine fake
    python benchmarks/fair_queue.py aaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbbbbbbbbbbbbb

First both keep tasks waiting, 100 and 10 of them: the shares of tokens should be equal. Then the
light one has a single task at a time: how long does it wait? The same key twice makes both one
caller, which is served first in, first out: that is what to compare with. Tasks take a second, so
that ten clients can ask faster than they are served: who does not wait has no share.
"""

import argparse
import asyncio
import itertools
import time

import httpx

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


async def measure(url: str, heavy_key: str, light_key: str, seconds: float) -> None:
    """Both phases."""

    def client(key: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=120,
            limits=httpx.Limits(max_connections=None),
        )

    async with client(heavy_key) as heavy, client(light_key) as light:
        for clients in (LIGHT, 1):
            begin = time.monotonic() + WARM_UP_S
            end = begin + seconds
            many, few = await asyncio.gather(keep(heavy, HEAVY, end), keep(light, clients, end))
            tokens = [
                TOKENS * sum(begin <= ended < end for ended, _ in done) for done in (many, few)
            ]
            waits = [wait for ended, wait in few if begin <= ended < end]
            print(
                f"{HEAVY}:{clients} waiting, {seconds:g} s: {tokens[0]} and {tokens[1]} tokens, "
                f"the light one's share {tokens[1] / sum(tokens):.1%}; "
                f"it waited p50 {percentile(waits, 50):.2f} s, p99 {percentile(waits, 99):.2f} s"
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("heavy_key")
    parser.add_argument("light_key")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    asyncio.run(measure(options.url, options.heavy_key, options.light_key, options.seconds))


if __name__ == "__main__":
    main()
