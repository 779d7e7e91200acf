"""F2: a worker that was frozen past its lease wakes up and can change nothing any more."""

import asyncio
import signal
import time

import httpx
import pytest
from tests.support import sse
from tests.support.fault_report import FaultRun
from tests.support.faults import (
    KILL_BAR_S,
    LEASE_S,
    SLACK_S,
    fields_of,
    held,
    owners,
    prompt,
    submit,
    undisturbed,
    watch,
    worker_id,
    written,
)
from tests.support.local_fleet import LocalFleet
from tests.support.waiting import eventually

from millstream.shared.keys import Keys
from millstream.shared.steps import STALE, AppendRow

SHARD = Keys(0)
TASKS, TOKENS = 4, 60


async def refused_everywhere(fleet: LocalFleet, worker: str, task_id: str) -> None:
    """Whatever is asked for in the name of the first attempt changes nothing."""
    before = await fields_of(fleet, task_id)
    first_attempt = (task_id, 1)
    owned = await owners(fleet)
    assert int(before["attempt"]) > 1
    more = AppendRow(task_id, 1, 3, int(before["seq"]) + 1, [("5", '"x"')], "", "")
    end = AppendRow(task_id, 1, 3, int(before["seq"]) + 1, [], "completed", "stop")
    for row in (more, end):
        answer = await fleet.scripts.append(
            SHARD, worker=worker, model="fake", result_ttl_s=9, rows=[row]
        )
        assert answer == [STALE]
    renewed = await fleet.scripts.renew(
        SHARD,
        worker=worker,
        model="fake",
        live_ttl_s=9,
        result_ttl_s=9,
        tasks=[first_attempt],
    )
    assert renewed == [STALE]
    given = await fleet.scripts.release(
        SHARD, worker=worker, model="fake", lease_s=LEASE_S, blame="", tasks=[first_attempt]
    )
    assert given == 0
    assert await fields_of(fleet, task_id) == before
    assert await owners(fleet) == owned


@pytest.mark.fault("F2 worker frozen, woken", bar_s=KILL_BAR_S)
async def test_who_wakes_late_is_refused_and_serves_on(fleet: LocalFleet, fault: FaultRun) -> None:
    api, first = await asyncio.gather(fleet.api(), fleet.worker())
    asked = held(20, 40, tokens=TOKENS)
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        task_ids = [await submit(http, asked) for _ in range(TASKS)]
        streams = [watch(http, task_id) for task_id in task_ids]
        await asyncio.gather(*(stream.__aenter__() for stream in streams))
        await written(fleet, dict.fromkeys(task_ids, 20))
        second = await fleet.worker()
        frozen_id, second_id = await worker_id(fleet, first), await worker_id(fleet, second)
        struck = time.monotonic()
        first.signal(signal.SIGSTOP)
        # The next owner is in the middle of them when the first wakes.
        await written(fleet, dict.fromkeys(task_ids, 40))
        await asyncio.gather(*(stream.upto(40) for stream in streams))
        fault.gaps_s += [stream.gap_after(struck) for stream in streams]
        assert max(fault.gaps_s) < KILL_BAR_S + SLACK_S

        async def long_asleep() -> bool:
            return time.monotonic() - struck > 3 * LEASE_S

        await eventually(long_asleep, what="three leases")
        first.signal(signal.SIGCONT)

        async def let_go() -> int:
            infos = {info.id: info for info in await fleet.workers()}
            info = infos.get(frozen_id)
            return info.stale_refused if info is not None and info.running == 0 else 0

        fault.hits = await eventually(let_go, what="the woken worker to be refused")
        assert fault.hits >= TASKS
        assert set((await owners(fleet)).values()) == {second_id}
        assert len(await owners(fleet)) == TASKS
        for task_id in task_ids:
            await refused_everywhere(fleet, frozen_id, task_id)
        await written(fleet, dict.fromkeys(task_ids, 40))

        # Its slots are free: it serves on, and be it the same tasks.
        second.signal(signal.SIGKILL)
        for task_id, stream in zip(task_ids, streams, strict=True):
            frames = await stream.end()
            sse.check_native(frames)
            fault.stream(stream.numbers, tokens=TOKENS)
            assert sse.native_text(frames) == undisturbed(asked, tokens=TOKENS)
            assert (await http.get(f"/tasks/{task_id}")).json()["attempts"] == 3
    await fleet.quiet()


async def test_a_frozen_idle_worker_is_sent_one_task_and_replaced(fleet: LocalFleet) -> None:
    """It has room, and no way to say that it does not hear."""
    api, first, second = await asyncio.gather(fleet.api(), fleet.worker(), fleet.worker())
    frozen_id, second_id = await worker_id(fleet, first), await worker_id(fleet, second)

    async def both_have_room() -> bool:
        return await fleet.scripts._client.zcard(SHARD.idle("fake")) == 2

    await eventually(both_have_room, what="both workers to wait for tasks")
    first.signal(signal.SIGSTOP)
    asked = prompt(tokens=20, rate=40)
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        task_ids = [await submit(http, asked) for _ in range(4)]
        streams = [watch(http, task_id) for task_id in task_ids]
        await asyncio.gather(*(stream.__aenter__() for stream in streams))
        attempts: list[int] = []
        for task_id, stream in zip(task_ids, streams, strict=True):
            frames = await stream.end()
            assert sse.native_text(frames) == undisturbed(asked, tokens=20)
            told = (await http.get(f"/tasks/{task_id}")).json()
            assert told["worker"] == second_id
            attempts.append(told["attempts"])
        assert sorted(attempts) == [1, 1, 1, 2]
        lost = [await fields_of(fleet, task_id) for task_id in task_ids]
        assert ["lost" in fields for fields in lost] == [False] * 4
        first.signal(signal.SIGCONT)

        async def let_go() -> bool:
            infos = {info.id: info for info in await fleet.workers()}
            return frozen_id in infos and infos[frozen_id].running == 0

        await eventually(let_go, what="the woken worker to let it go")
    await fleet.quiet()
