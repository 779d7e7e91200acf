"""What queue and relay add to the first token, and how many tasks a pod takes a second.

    python -m benchmarks.ttft [--quick] [--no-peers] [--json FILE]

One client on one connection asks one thing after the other, in turns of Millstream (an API pod, a
Valkey with its log on disk, a worker with the fake engine) and of the same engine behind FastAPI in
one process, and of the usual queue between the two. What is added is the difference of the medians,
and of the 99th percentiles. For a gateway it is the difference to the fake OpenAI server behind it.
In turns too, so that what else the machine does meets all alike. The fake engine's tokens are all
there at once, so that they and the end of the answer share a call; no model is so quick. `apart` is
the same with a millisecond between them.

`submit` is `POST /tasks` by several clients at once, and no worker: CPU of the pod and of Valkey.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import statistics
import sys
import time
from collections.abc import Sequence

import uvloop
from tests.support.ports import free_port

from benchmarks.support import peers
from benchmarks.support.crowd import chat, post
from benchmarks.support.processes import Started, pod, started, valkey, worker
from benchmarks.support.report import Row, finish

TOKENS = 4
RATE = 1000  # tokens/s
CLIENTS = 16
ANSWER_S = 10.0  # a bound on hangs
WARM = 50
READY_S = 20.0
# An opening chunk has an empty one.
FIRST = re.compile(rb'"content":\s?"[^"]')
END = b"\r\n0\r\n\r\n"


class Client:
    """One connection, which asks one thing after the other."""

    def __init__(self, port: int, request: str) -> None:
        self._port = port
        self._request = request.encode()
        self._connection = self._connect()

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=ANSWER_S)

    def first_token_s(self) -> float:
        """How long the first token takes; reads the answer to its end.

        Raises:
            RuntimeError: there was none.
        """
        began, first, answer = time.perf_counter(), 0.0, b""
        self._connection.sendall(self._request)
        while not answer.endswith(END):
            piece = self._connection.recv(65_536)
            if not piece:
                break
            answer += piece
            if not first and FIRST.search(answer):
                first = time.perf_counter()
        if not first:
            self._connection.close()
            self._connection = self._connect()
            raise RuntimeError(f"no token: {answer[:300]!r}")
        return first - began

    def wait_until_ready(self) -> None:
        """Ask until there is a first token.

        Raises:
            RuntimeError: there is none in time.
        """
        deadline = time.monotonic() + READY_S
        while True:
            try:
                self.first_token_s()
            except (RuntimeError, OSError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return


def in_turns(clients: Sequence[Client], rounds: int) -> list[list[float]]:
    """Times to the first token of each client, in ms."""
    for client in clients:
        client.wait_until_ready()
    times: list[list[float]] = [[] for _ in clients]
    for number in range(WARM + rounds):
        for client, took in zip(clients, times, strict=True):
            ms = client.first_token_s() * 1e3
            if number >= WARM:
                took.append(ms)
    return times


def compare(straight: list[float], through: list[float]) -> dict[str, float]:
    """What the way through adds, in ms."""
    (p50, p99), (base50, base99) = map(percentiles, (through, straight))
    return {
        "added_p50_ms": p50 - base50, "added_p99_ms": p99 - base99, "p50_ms": p50, "p99_ms": p99,
        "alone_p50_ms": base50, "alone_p99_ms": base99,
    }  # fmt: skip


def percentiles(times: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    ordered = sorted(times)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]


def on_redis(rounds: int, *, usual: bool) -> list[Row]:
    """Through pod, store and worker, and maybe the usual queue, beside the same engine alone."""
    requests = {
        "first token": chat(f'@fake {{"tokens": {TOKENS}}}\nx', max_tokens=TOKENS),
        "apart": chat(f'@fake {{"tokens": {TOKENS}, "rate": {RATE}}}\nx', max_tokens=TOKENS),
    }
    alone_port, usual_port = free_port(), free_port()
    alone = [sys.executable, "-m", "benchmarks.support.in_process", str(alone_port)]
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        store, _ = stack.enter_context(valkey()), stack.enter_context(started(alone, alone_port))
        served, _ = stack.enter_context(pod(store)), stack.enter_context(worker(store))
        ports = {"millstream": served.port}
        if usual:
            url = stack.enter_context(valkey()).url
            queue = [sys.executable, "-m", "benchmarks.support.usual_queue", str(usual_port), url]
            stack.enter_context(started(queue, usual_port))
            ports[peers.REDIS_STREAMS] = usual_port
        for case, request in requests.items():
            straight, *through = in_turns(
                [Client(port, request) for port in (alone_port, *ports.values())], rounds
            )
            for who, times in zip(ports, through, strict=True):
                rows.append(Row(who, case, compare(straight, times)))
    return rows


def gateway(peer: peers.Peer, rounds: int) -> dict[str, float]:
    """Through a gateway, beside what is behind it."""
    with peers.in_front(peer) as (front, behind):
        request = chat(json.dumps({"tokens": TOKENS}))
        return compare(*in_turns([Client(port, request) for port in (behind, front.port)], rounds))


async def submits(count: int) -> dict[str, float]:
    """So many tasks, from several clients at once."""
    with valkey() as store, pod(store) as served:
        request = post("/tasks", {"model": "m", "prompt": "x" * 400, "max_tokens": 64}).encode()
        await submit(served, request, count // 4)
        before, began = (served.cpu_s(), store.cpu_s()), time.monotonic()
        await submit(served, request, count)
        took = time.monotonic() - began
        pod_us = (served.cpu_s() - before[0]) / count * 1e6
        return {
            "submits_per_s": count / took,
            "submits_per_core_s": 1e6 / pod_us,
            "pod_us": pod_us,
            "valkey_us": (store.cpu_s() - before[1]) / count * 1e6,
        }


async def submit(served: Started, request: bytes, count: int) -> None:
    """So many submits, evenly spread over the clients."""

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        with contextlib.closing(writer):
            for _ in range(count // CLIENTS):
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 202"):
                    raise RuntimeError(head.decode())
                size = re.search(rb"content-length: (\d+)", head)
                assert size is not None
                await reader.readexactly(int(size[1]))

    async with asyncio.timeout(READY_S):
        await asyncio.gather(*(one() for _ in range(CLIENTS)))


def run(options: argparse.Namespace) -> list[Row]:
    """Millstream, then each peer, as many turns each."""
    rows = on_redis(options.requests, usual=not options.no_peers)
    runs = [uvloop.run(submits(options.submits)) for _ in range(options.rounds)]
    median = {key: statistics.median(one[key] for one in runs) for key in runs[0]}
    rows.append(Row("millstream", "submit", median))
    if options.no_peers:
        return rows
    found, missing = peers.installed()
    for peer in found:
        print(f"{peer.title}; load {os.getloadavg()[0]:.1f}", flush=True)
        try:
            rows.append(Row(peer.title, "first token", gateway(peer, options.requests)))
        except (RuntimeError, TimeoutError, OSError) as error:
            missing[peer.title] = str(error)
    return rows + [Row(who, "first token", skipped=why) for who, why in missing.items()]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer of all")
    parser.add_argument("--requests", type=int, default=None, help="for a first token, of each")
    parser.add_argument("--submits", type=int, default=None, help="of each round")
    parser.add_argument("--rounds", type=int, default=None, help="of submits")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    options.requests = options.requests or (300 if options.quick else 1000)
    options.submits = options.submits or (800 if options.quick else 4000)
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.no_peers = options.no_peers or options.quick
    return finish("ttft", run(options), json_to=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
