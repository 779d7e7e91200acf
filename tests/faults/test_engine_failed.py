"""F22: the engine's thread dies or hangs in a process that lives; the tasks move."""

import asyncio
import json
import time

import httpx
import pytest
from tests.support import sse
from tests.support.fault_report import FaultRun
from tests.support.faults import (
    LEASE_S,
    SLACK_S,
    SWEEP_S,
    held,
    prompt,
    submit,
    undisturbed,
    watch,
    worker_id,
    written,
)
from tests.support.local_fleet import LocalFleet
from tests.support.waiting import eventually

from millstream.shared.states import WorkerState

TOKENS = 40


@pytest.mark.fault("F22 engine dead or hung")
@pytest.mark.parametrize("how", [{"die_at": 4}, {"hang_at": 4}, {"hang_at": 1}], ids=json.dumps)
async def test_tasks_move_from_an_engine_that_makes_no_steps(
    fleet: LocalFleet, fault: FaultRun, how: dict[str, int]
) -> None:
    api, first = await asyncio.gather(fleet.api(), fleet.worker())
    await worker_id(fleet, first)
    asked = held(20, tokens=TOKENS)
    (at,) = how.values()
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        good = await submit(http, asked)
        async with watch(http, good) as stream:
            await written(fleet, {good: 20})
            bad = await submit(http, prompt(tokens=9, **how))
            struck = time.monotonic()
            await written(fleet, {bad: at - 1})

            async def not_ready() -> bool:
                states = [info.state for info in await fleet.workers()]
                return WorkerState.READY not in states

            await eventually(not_ready, what="a worker that is not ready")
            assert time.monotonic() - struck < LEASE_S + SWEEP_S + SLACK_S
            assert await first.ended() == 1
            fault.hits += 1
            # The next worker must not meet it too.
            stopped = (await http.post(f"/tasks/{bad}/stop")).json()
            assert stopped["status"] == "cancelled"
            assert stopped["usage"]["completion_tokens"] == at - 1
            second = await fleet.worker()
            assert await fleet.owner(good) is second
            frames = await stream.end()
            fault.stream(stream.numbers, tokens=TOKENS)
        sse.check_native(frames)
        assert sse.native_text(frames) == undisturbed(asked, tokens=TOKENS)
        assert (await http.get(f"/tasks/{good}")).json()["attempts"] == 2
    await fleet.quiet()
