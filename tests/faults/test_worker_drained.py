"""F3: a worker is told to go, and what becomes of its tasks if it dies while it goes."""

import asyncio
import signal
import time

import httpx
import pytest
from tests.support import sse
from tests.support.fault_report import FaultRun
from tests.support.faults import (
    DRAIN_BAR_S,
    KILL_BAR_S,
    SLACK_S,
    held,
    prompt,
    submit,
    undisturbed,
    watch,
    worker_id,
    written,
)
from tests.support.local_fleet import LocalFleet
from tests.support.redis_servers import on_primaries
from tests.support.store import Store

from millstream.fleet.chaos.link import Link
from millstream.shared.keys import Keys

PREFILL_S = 3.0
RUNNING, TOKENS = 6, 40


@pytest.mark.fault("F3 worker drained", bar_s=DRAIN_BAR_S)
async def test_sigterm_hands_eight_tasks_over_at_once(fleet: LocalFleet, fault: FaultRun) -> None:
    api, first = await asyncio.gather(fleet.api(), fleet.worker())
    running, prefill = held(20, tokens=TOKENS), prompt(tokens=TOKENS, delay_s=PREFILL_S)
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        asked = {await submit(http, running): running for _ in range(RUNNING)}
        await written(fleet, dict.fromkeys(asked, 20))
        second = await fleet.worker()
        second_id = await worker_id(fleet, second)
        # Two of them would be the second worker's, if it had not its hands full.
        second.signal(signal.SIGSTOP)
        await fleet.scripts._client.zrem(Keys(0).idle("fake"), second_id)
        early = [await submit(http, prefill) for _ in range(2)]
        asked |= dict.fromkeys(early, prefill)
        streams = {task_id: watch(http, task_id) for task_id in asked}
        await asyncio.gather(*(stream.__aenter__() for stream in streams.values()))
        await written(fleet, dict.fromkeys(early, 0))
        second.signal(signal.SIGCONT)
        struck = time.monotonic()
        first.signal(signal.SIGTERM)
        late = await submit(http, prompt(tokens=3))
        assert await first.ended() == 0
        for task_id, stream in streams.items():
            frames = await stream.end()
            sse.check_native(frames)
            fault.stream(stream.numbers, tokens=TOKENS)
            assert sse.native_text(frames) == undisturbed(asked[task_id], tokens=TOKENS)
            task = (await http.get(f"/tasks/{task_id}")).json()
            assert task["attempts"] == 2, "the drain did not hit"
            assert task["worker"] == second_id
            fault.hits += 1
            if task_id not in early:
                fault.gaps_s.append(stream.gap_after(struck))
        # A drain is no loss, and nobody waited for a lease.
        assert max(fault.gaps_s) < 2
        assert (await http.get(f"/tasks/{late}")).json()["worker"] == second_id
    await fleet.quiet()


async def test_a_lease_that_is_renewed_beside_a_hand_over_is_no_loss(
    store: Store, frail: LocalFleet
) -> None:
    """The renewal comes after the hand-over, and is told that the task is another's."""
    async with Link(store.connect) as link:
        api, first = await asyncio.gather(frail.api(), frail.worker(redis_url=link.url, lease_s=1))
        async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
            task_id = await submit(http, held(20, tokens=TOKENS))
            await written(frail, {task_id: 20})
            link.slow_down(0.3)  # each way, and leases of 1 s are renewed every 0.33 s
            first.signal(signal.SIGTERM)
            assert await first.ended() == 0
            assert (await http.post(f"/tasks/{task_id}/stop")).json()["status"] == "cancelled"
    assert "handed 1 tasks over" in first.text()
    assert "moved on" not in first.text()


@pytest.mark.fault("F3 worker killed while it drains", bar_s=KILL_BAR_S)
@pytest.mark.parametrize(
    ("then", "exit_code"),
    [
        pytest.param(signal.SIGKILL, -signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGTERM, 128 + signal.SIGTERM, id="told twice"),
        pytest.param(None, 0, id="redis away"),
    ],
)
async def test_a_drain_that_does_not_come_to_its_end_loses_nothing(
    fleet: LocalFleet, fault: FaultRun, then: signal.Signals | None, exit_code: int
) -> None:
    api, first = await asyncio.gather(fleet.api(), fleet.worker(drain_s=2))
    asked = held(20, tokens=TOKENS)
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        task_ids = [await submit(http, asked) for _ in range(RUNNING)]
        streams = [watch(http, task_id) for task_id in task_ids]
        await asyncio.gather(*(stream.__aenter__() for stream in streams))
        await written(fleet, dict.fromkeys(task_ids, 20))
        await fleet.worker()
        # The hand-over can be begun and not ended while Redis takes nothing.
        await on_primaries(fleet.redis, "CLIENT", "PAUSE", 10_000, "WRITE")
        struck = time.monotonic()
        first.signal(signal.SIGTERM)
        if then is not None:
            with pytest.raises(AssertionError, match="did not come"):
                await first.ended(within_s=1)
            first.signal(then)
        assert await first.ended() == exit_code
        assert time.monotonic() - struck < 2 + SLACK_S
        await on_primaries(fleet.redis, "CLIENT", "UNPAUSE")
        healed = time.monotonic()
        for task_id, stream in zip(task_ids, streams, strict=True):
            frames = await stream.end()
            sse.check_native(frames)
            fault.stream(stream.numbers, tokens=TOKENS)
            assert sse.native_text(frames) == undisturbed(asked, tokens=TOKENS)
            assert (await http.get(f"/tasks/{task_id}")).json()["attempts"] == 2
            fault.gaps_s.append(stream.gap_after(healed))
            fault.hits += 1
        assert max(fault.gaps_s) < KILL_BAR_S + SLACK_S
    await fleet.quiet()
