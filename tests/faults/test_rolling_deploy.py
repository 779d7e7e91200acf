"""F23: pods and workers are replaced one after the other under load, and nobody notices.

FAULT_DEPLOY_S=180 FAULT_DEPLOY_RPS=50 is the long form.
"""

import asyncio
import os
import signal
import time
from typing import Any

import httpx
import pytest
from tests.support import sse
from tests.support.fault_report import FaultRun
from tests.support.faults import DRAIN_BAR_S, prompt, undisturbed
from tests.support.local_fleet import LocalFleet, Process

from millstream.api.streams import RETRY_MS

DEPLOY_S = float(os.environ.get("FAULT_DEPLOY_S", "4"))
RATE = float(os.environ.get("FAULT_DEPLOY_RPS", "10"))
TOKENS, TOKENS_PER_S = 60, 40
ASKED = prompt(tokens=TOKENS, rate=TOKENS_PER_S)
MOST_RECONNECTS = 2


class Client:
    """Takes the pods in turn, and passes one over if it refuses the connection, and only then."""

    def __init__(self, http: httpx.AsyncClient, ports: list[int], turn: int) -> None:
        self._http = http
        self._ports = ports
        self._turn = turn

    async def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        for _ in self._ports:
            self._turn += 1
            url = f"http://127.0.0.1:{self._ports[self._turn % len(self._ports)]}{path}"
            request = self._http.build_request(method, url, **arguments)
            try:
                return await self._http.send(request, stream=True)
            except httpx.ConnectError:
                continue
        raise AssertionError("every pod refuses")

    async def one_task(self, fault: FaultRun) -> None:
        """Submit a task and read it to its end, coming back wherever a stream was ended."""
        answer = await self._send("POST", "/tasks", json={"prompt": ASKED})
        await answer.aread()
        assert answer.status_code == 202, answer.text
        path = answer.json()["stream_url"]
        frames: list[sse.Frame] = []
        last = time.monotonic()
        for _ in range(MOST_RECONNECTS + 1):
            after = str(len(frames))
            answer = await self._send("GET", path, headers={"Last-Event-ID": after})
            assert answer.status_code == 200
            async for frame in sse.frames(answer.aiter_lines()):
                if frame.event != "queued":
                    frames.append(frame)
                    fault.gaps_s.append(time.monotonic() - last)
                    last = time.monotonic()
            await answer.aclose()
            if frames and frames[-1].event != "token":
                break
            await asyncio.sleep(RETRY_MS / 1000)  # as the stream's last line asks
        sse.check_native(frames)
        fault.stream([int(frame.id or 0) for frame in frames[:-1]], tokens=TOKENS)
        assert frames[-1].event == "completed"
        assert sse.native_text(frames) == undisturbed(ASKED, tokens=TOKENS)


@pytest.mark.fault("F23 rolling deploy", bar_s=DRAIN_BAR_S)
@pytest.mark.timeout(DEPLOY_S + 50)
async def test_a_rolling_deploy_under_load(fleet: LocalFleet, fault: FaultRun) -> None:
    *pods, one, two = await asyncio.gather(fleet.api(), fleet.api(), fleet.worker(), fleet.worker())
    ports = [int(pod.url.rpartition(":")[2]) for pod in pods]
    workers: list[Process] = [one, two]
    started = 0
    stop = asyncio.Event()

    async def load(tasks: asyncio.TaskGroup) -> None:
        nonlocal started
        while not stop.is_set():
            started += 1
            tasks.create_task(Client(http, ports, started).one_task(fault))
            try:
                await asyncio.wait_for(stop.wait(), 1 / RATE)
            except TimeoutError:
                continue

    # A connection for each request, as a balancer of connections gives it.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(timeout=20, limits=limits) as http,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(load(tasks))
        until = time.monotonic() + DEPLOY_S
        while time.monotonic() < until or fault.hits < 4:
            at = fault.hits // 2 % 2
            if fault.hits % 2:  # the new worker first, then the old one goes
                old, workers[at] = workers[at], await fleet.worker()
                old.signal(signal.SIGTERM)
                assert await old.ended() == 0
            else:
                pods[at].signal(signal.SIGTERM)
                assert await pods[at].ended(within_s=20) == 0
                pods[at] = await fleet.api(port=ports[at])
            fault.hits += 1
        stop.set()
    assert fault.streams == started
    await fleet.quiet()
