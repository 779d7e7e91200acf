"""What nginx adds between a pod and its clients: spacing of tokens, and time to the first.

    python -m benchmarks.through_nginx --streams 20

Starts the services of docker-compose.yml with the fake engine (needs nginx), and reads streams at a
steady rate by all ways in turn: from the pod, through nginx, and through it by TLS and HTTP/2.
"""

import argparse
import asyncio
import json
import ssl
import statistics
from itertools import pairwise

import httpx
from tests.support import native
from tests.support.compose_cluster import ComposeCluster


def milliseconds(values: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    ordered = sorted(values)
    return {
        "p50_ms": round(1000 * statistics.median(ordered), 2),
        "p99_ms": round(1000 * ordered[int(0.99 * (len(ordered) - 1))], 2),
    }


async def measure(*, streams: int, rounds: int, tokens: int, rate: float) -> None:
    """All ways, round by round, so that the machine's moods meet each alike."""
    async with ComposeCluster(MILLSTREAM_ENGINE="fake") as cluster:
        await cluster.up(nginx="nginx-tls")
        door = cluster.doors[0]
        pod = f"http://127.0.0.1:{cluster.named('api')[0].environment['MILLSTREAM_PORT']}"
        trust = ssl.create_default_context(cafile=door.certificate)
        limits = httpx.Limits(max_connections=None)
        ways = {
            "pod": httpx.AsyncClient(base_url=pod, limits=limits),
            "nginx": httpx.AsyncClient(base_url=door.url, limits=limits),
            "nginx, TLS, HTTP/2": httpx.AsyncClient(
                base_url=door.tls_url, limits=limits, verify=trust, http2=True
            ),
        }
        firsts: dict[str, list[float]] = {way: [] for way in ways}
        gaps: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way, http in ways.items():
                jobs = (native.token_times(http, tokens=tokens, rate=rate) for _ in range(streams))
                for times in await asyncio.gather(*jobs):
                    if number:  # the first round warms up
                        firsts[way].append(times[0])
                        gaps[way] += [after - before for before, after in pairwise(times)]
        for way, http in ways.items():
            print(json.dumps({"way": way, "first": milliseconds(firsts[way]),
                              "gap": milliseconds(gaps[way])}))  # fmt: skip
            await http.aclose()


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=20, help="at once, by each way")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=60, help="of each stream")
    parser.add_argument("--rate", type=float, default=40, help="tokens per second of each stream")
    asyncio.run(measure(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
