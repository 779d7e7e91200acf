"""F21: a crowd that waits costs little, and comes back at once when its pod is killed.

FAULT_STREAMS=10000 is the long form.
"""

import asyncio
import os
import random
import re
import resource
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import httpx
import pytest
from tests.support.fault_report import FaultRun
from tests.support.faults import SLACK_S, busy, prompt
from tests.support.local_fleet import Api, LocalFleet
from tests.support.waiting import eventually

STREAMS = int(os.environ.get("FAULT_STREAMS", "300"))
LONG_S = (20 + STREAMS / 40) * busy()
AT_ONCE = 50  # new connections: a crowd does not come in one instant
KEEPALIVE_S = max(2.0, STREAMS / 1000)


class IdleReader:
    """What a browser does: it reads, and comes back with the last number it has."""

    def __init__(self, task_id: str, pods: Sequence[Api], gate: asyncio.Semaphore) -> None:
        self._task_id = task_id
        self._pods = pods
        self._gate = gate
        self.open = asyncio.Event()
        self.opened = 0
        self.pings: list[float] = []
        """When keepalives came."""
        self.numbers: list[int] = []
        self.ended = False

    async def run(self) -> None:
        while not self.ended:
            with suppress(OSError):  # the pod is gone
                await self._read(self._pods[self.opened % len(self._pods)])
            self.open.clear()
            await asyncio.sleep(random.uniform(0, 1))

    async def _read(self, pod: Api) -> None:
        port = int(pod.url.rpartition(":")[2])
        async with self._gate:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            last = self.numbers[-1] if self.numbers else 0
            writer.write(
                f"GET /tasks/{self._task_id}/stream HTTP/1.1\r\nHost: x\r\n"
                f"Last-Event-ID: {last}\r\nConnection: close\r\n\r\n".encode()
            )
            status = await reader.readline()
        try:
            assert status.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503")), status
            if b" 503 " in status:
                head = await reader.readuntil(b"\r\n\r\n")
                assert re.search(rb"(?i)^retry-after: [1-9]", head, re.MULTILINE), head
            async for line in reader:
                if line.startswith(b": ok"):
                    self.opened += 1
                    self.open.set()
                if line.startswith(b": ping"):
                    self.pings.append(time.monotonic())
                if line.startswith(b"id: "):
                    self.numbers.append(int(line[4:]))
                self.ended |= line.startswith(b"event: completed")
        finally:
            writer.close()


@pytest.mark.fault("F21 pod killed under a waiting crowd")
@pytest.mark.timeout(LONG_S)
async def test_a_waiting_crowd_is_cheap_and_comes_back(fleet: LocalFleet, fault: FaultRun) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert hard > STREAMS + 500, "too few file descriptors are allowed here"
    settings = {"model": "fake", "max_queue": STREAMS + 500, "keepalive_s": KEEPALIVE_S}
    first, second = await asyncio.gather(fleet.api(**settings), fleet.api(**settings))
    gate, pods = asyncio.Semaphore(AT_ONCE), (first, second)
    limits = httpx.Limits(max_connections=20)
    async with (
        asyncio.TaskGroup() as crowd,
        httpx.AsyncClient(base_url=second.url, timeout=LONG_S, limits=limits) as http,
    ):

        async def submit() -> str:
            async with gate:  # a client that many wait for takes long to choose whose turn it is
                answer = await http.post("/tasks", json={"prompt": prompt(tokens=1)})
            assert answer.status_code == 202
            return answer.json()["task_id"]

        task_ids = await asyncio.gather(*(submit() for _ in range(STREAMS)))
        before = [pod.memory_mb() for pod in pods]
        readers = [
            IdleReader(task_id, pods if number % 2 else pods[::-1], gate)
            for number, task_id in enumerate(task_ids)
        ]
        for reader in readers:
            crowd.create_task(reader.run())
        await asyncio.wait_for(asyncio.gather(*(r.open.wait() for r in readers)), LONG_S)

        async def kept_alive() -> bool:
            return all(len(reader.pings) >= 3 for reader in readers)

        await eventually(kept_alive, within_s=LONG_S, what="keepalives of all")
        per_stream_kb = [
            (pod.memory_mb() - was) * 1024 / (STREAMS / 2)
            for pod, was in zip(pods, before, strict=True)
        ]
        clients = (await fleet.redis.info("clients"))["connected_clients"]
        late = sorted(
            after - before - KEEPALIVE_S
            for reader in readers
            for before, after in pairwise(reader.pings)
        )
        times: list[float] = []
        for _ in range(100):
            began = time.monotonic()
            task_ids.append(await submit())
            times.append(time.monotonic() - began)
        times.sort()
        figures = (
            f"{max(per_stream_kb):.0f} kB a stream, {clients} Redis clients, "
            f"POST p50 {times[49] * 1000:.0f} and p99 {times[98] * 1000:.0f} ms, "
            f"keepalives of {KEEPALIVE_S:.0f} s off by p50 {late[len(late) // 2] * 1000:+.0f}, "
            f"p99 {late[len(late) * 99 // 100] * 1000:+.0f} and at most {late[-1] * 1000:+.0f} ms"
        )
        fault.note = figures
        # A fixed cost besides: buffers and pools grow once, whatever the number of streams.
        assert max(per_stream_kb) < 50 + 20_000 / STREAMS, figures
        assert clients < 50, figures
        assert times[98] < 0.2 + SLACK_S, figures
        assert late[-1] < KEEPALIVE_S + SLACK_S, figures

        struck = time.monotonic()
        first.signal(signal.SIGKILL)
        await first.ended()

        async def all_back() -> bool:
            return (
                all(reader.open.is_set() for reader in readers)
                and sum(reader.opened == 2 for reader in readers) == STREAMS // 2
            )

        await eventually(all_back, within_s=LONG_S, what="the readers of the dead pod")
        fault.gaps_s.append(time.monotonic() - struck)
        fault.hits += STREAMS // 2
        await fleet.worker()

        async def over() -> bool:
            return all(reader.ended for reader in readers)

        await eventually(over, within_s=LONG_S, what="the ends of all")
        for reader in readers:
            assert reader.numbers == [1, 2]
            fault.stream(reader.numbers[:1], tokens=1)
    await fleet.quiet(within_s=LONG_S)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
