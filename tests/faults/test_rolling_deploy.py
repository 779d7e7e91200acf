"""F23: pods and workers are replaced one after the other under load, and nobody notices.

FAULT_DEPLOY_S=180 FAULT_DEPLOY_RPS=50 is the long form.
"""

import asyncio
import os
import signal
import time

import httpx
import pytest
from tests.support import sse
from tests.support.callers import Caller, load
from tests.support.fault_report import FaultRun
from tests.support.faults import DRAIN_BAR_S, prompt, undisturbed
from tests.support.local_fleet import LocalFleet, Process

DEPLOY_S = float(os.environ.get("FAULT_DEPLOY_S", "4"))
RATE = float(os.environ.get("FAULT_DEPLOY_RPS", "10"))
TOKENS, TOKENS_PER_S = 60, 40
ASKED = prompt(tokens=TOKENS, rate=TOKENS_PER_S)


@pytest.mark.fault("F23 rolling deploy", bar_s=DRAIN_BAR_S)
@pytest.mark.timeout(DEPLOY_S + 50)
async def test_a_rolling_deploy_under_load(fleet: LocalFleet, fault: FaultRun) -> None:
    *pods, one, two = await asyncio.gather(fleet.api(), fleet.api(), fleet.worker(), fleet.worker())
    urls = [pod.url for pod in pods]
    workers: list[Process] = [one, two]

    async def ask(number: int) -> None:
        caller = Caller(http, urls, number)
        frames = await caller.streams_a_task(ASKED)
        fault.gaps_s += caller.gaps_s
        fault.stream([int(frame.id or 0) for frame in frames[:-1]], tokens=TOKENS)
        assert sse.native_text(frames) == undisturbed(ASKED, tokens=TOKENS)

    # A connection for each request, as a balancer of connections gives it.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(timeout=20, limits=limits) as http,
        load(ask, rate=RATE) as asked,
    ):
        until = time.monotonic() + DEPLOY_S
        while time.monotonic() < until or fault.hits < 4:
            at = fault.hits // 2 % 2
            # The new worker comes while the pod goes; then the old worker goes.
            pods[at].signal(signal.SIGTERM)
            coming = asyncio.create_task(fleet.worker())
            assert await pods[at].ended(within_s=20) == 0
            pods[at] = await fleet.api(port=int(urls[at].rpartition(":")[2]))
            old, workers[at] = workers[at], await coming
            old.signal(signal.SIGTERM)
            assert await old.ended() == 0
            fault.hits += 2
    assert fault.streams == len(asked)
    fault.note = f"{len(asked)} posts, {fault.hits} processes replaced, none of it noticed"
    await fleet.quiet()
