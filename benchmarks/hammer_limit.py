"""How many requests one key gets through its limit, however many processes hammer the pods.

    MILLSTREAM_RATE_LIMIT_REQUESTS_PER_MIN=60 millstream up --engine fake --apis 2
    python benchmarks/hammer_limit.py http://127.0.0.1:8000 http://127.0.0.1:8001

Four processes ask as fast as they can for two minutes. From the times at which tasks were accepted,
by Redis's clock, the fullest minute is found: it must hold no more than the limit. Exits with 1 if
it does, or if some request was answered otherwise than by 202 or 429.
"""

import argparse
import asyncio
import bisect
import multiprocessing
import sys
import time
from collections import Counter

import httpx

WINDOW_S = 60.0
AT_ONCE = 4


async def hammer(urls: list[str], key: str, seconds: float) -> tuple[list[str], Counter[int]]:
    """One process's accepted tasks, and how often each status came."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    statuses = Counter[int]()
    accepted: list[str] = []
    until = time.monotonic() + seconds

    async def ask(http: httpx.AsyncClient) -> None:
        turn = 0
        while time.monotonic() < until:
            turn += 1
            body = {"prompt": '@fake {"tokens": 1}\nhello'}
            answer = await http.post(f"{urls[turn % len(urls)]}/tasks", json=body)
            statuses[answer.status_code] += 1
            if answer.status_code == 202:
                accepted.append(answer.json()["task_id"])

    async with httpx.AsyncClient(headers=headers, timeout=30) as http:
        await asyncio.gather(*(ask(http) for _ in range(AT_ONCE)))
    return accepted, statuses


def work(urls: list[str], key: str, seconds: float) -> tuple[list[str], Counter[int]]:
    """A process of its own."""
    return asyncio.run(hammer(urls, key, seconds))


def fullest_window(times: list[float]) -> int:
    """The most that any minute holds."""
    times = sorted(times)
    return max(
        (bisect.bisect_right(times, start + WINDOW_S) - at for at, start in enumerate(times)),
        default=0,
    )


def main() -> int:
    """Hammer, then judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--key", default="")
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    with multiprocessing.Pool(options.processes) as pool:
        one = (options.urls, options.key, options.seconds)
        results = pool.starmap(work, [one] * options.processes)
    statuses = sum((counted for _, counted in results), Counter[int]())
    headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
    with httpx.Client(base_url=options.urls[0], headers=headers) as http:
        times = [
            http.get(f"/tasks/{task_id}").json()["created_at"]
            for accepted, _ in results
            for task_id in accepted
        ]
    fullest = fullest_window(times)
    print(f"{sum(statuses.values())} requests in {options.seconds:g} s: {dict(statuses)}")
    print(f"accepted {len(times)}; the fullest minute has {fullest} of {options.limit}")
    return int(fullest > options.limit or set(statuses) - {202, 429} != set())


if __name__ == "__main__":
    sys.exit(main())
