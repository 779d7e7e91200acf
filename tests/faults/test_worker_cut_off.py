"""F16: a worker that cannot renew stops writing before its lease lapses, and is then refused."""

import asyncio
import time

import httpx
import pytest
from tests.support import sse
from tests.support.fault_report import FaultRun
from tests.support.faults import (
    KILL_BAR_S,
    LEASE_S,
    SLACK_S,
    prompt,
    submit,
    undisturbed,
    watch,
)
from tests.support.local_fleet import LocalFleet
from tests.support.store import Store
from tests.support.waiting import eventually

from millstream.fleet.chaos.link import Link
from millstream.shared.keys import Keys

QUEUE = Keys(0).queue("fake")
TASKS, STRUCK_AT = 4, 20


@pytest.mark.fault("F16 worker's link silent", bar_s=KILL_BAR_S)
async def test_a_black_hole_moves_its_tasks(
    store: Store, frail: LocalFleet, fault: FaultRun
) -> None:
    tokens = 240
    asked = prompt(tokens=tokens, rate=40)
    async with Link(store.connect) as link:
        api, cut = await asyncio.gather(frail.api(), frail.worker(redis_url=link.url))
        async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
            task_ids = [await submit(http, asked) for _ in range(TASKS)]
            streams = [watch(http, task_id) for task_id in task_ids]
            await asyncio.gather(*(stream.__aenter__() for stream in streams))
            await frail.worker()
            await asyncio.gather(*(stream.upto(STRUCK_AT) for stream in streams))
            struck = time.monotonic()
            link.silence()

            async def taken_over() -> bool:
                tasks = [Keys(0).task(task_id) for task_id in task_ids]
                attempts = [await frail.redis.hget(task, "attempt") for task in tasks]
                return attempts == [b"2"] * TASKS and time.monotonic() - struck > 2 * LEASE_S

            await eventually(taken_over, within_s=20, what="the other worker")
            fault.gaps_s += [stream.gap_after(struck) for stream in streams]
            assert max(fault.gaps_s) < KILL_BAR_S + SLACK_S
            link.heal()  # and what was on its way arrives

            async def refused() -> int:
                infos = {info.pid: info for info in await frail.workers()}
                info = infos.get(cut.pid)
                return info.stale_refused if info is not None and info.running == 0 else 0

            fault.hits = await eventually(refused, what="the cut worker to be refused")
            assert fault.hits >= TASKS
            for task_id, stream in zip(task_ids, streams, strict=True):
                frames = await stream.end()
                sse.check_native(frames)
                fault.stream(stream.numbers, tokens=tokens)
                assert sse.native_text(frames) == undisturbed(asked, tokens=tokens)
                assert (await http.get(f"/tasks/{task_id}")).json()["attempts"] == 2
        assert cut.text().count("\n") < 20
    await frail.quiet()


@pytest.mark.fault("F16 renewals refused")
async def test_who_cannot_renew_writes_no_more(
    store: Store, frail: LocalFleet, fault: FaultRun
) -> None:
    """Its appends would still arrive: nothing but its own clock keeps it from sending them.

    It has one slot, so it does not sweep either, and takes no task over from itself.
    """
    acl = ("ACL", "SETUSER", "narrow")
    await frail.redis.execute_command(*acl, "on", "nopass", "~*", "&*", "+@all")
    own_url = store.url.replace("://", "://narrow:any@")
    api, worker = await asyncio.gather(
        frail.api(), frail.worker(redis_url=own_url, max_concurrent=1)
    )
    tokens = 200
    asked = prompt(tokens=tokens, rate=40)
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        task_id = await submit(http, asked)
        async with watch(http, task_id) as stream:
            await stream.upto(STRUCK_AT)
            await frail.redis.execute_command(*acl, "-xclaim")

            async def length_after(leases: float) -> int:
                """Of the log, once the task's lease was not renewed for so long."""

                async def look() -> int:
                    async with frail.redis.pipeline(transaction=True) as pipe:
                        pipe.xlen(Keys(0).log(task_id))
                        pipe.xpending_range(QUEUE, "workers", "-", "+", 10)
                        length, (entry,) = await pipe.execute()
                    idle_s = entry["time_since_delivered"] / 1000
                    return length if idle_s >= leases * LEASE_S else 0

                return await eventually(look, what=f"{leases:g} leases without a renewal")

            lapsed = await length_after(1)
            assert STRUCK_AT < lapsed < tokens
            assert await length_after(1.5) == lapsed
            (info,) = await frail.workers()
            assert (info.pid, info.running) == (worker.pid, 1)
            await frail.redis.execute_command(*acl, "+xclaim")
            # Nobody had taken it over, so it goes on with all that it generated meanwhile.
            frames = await stream.end()
        sse.check_native(frames)
        fault.stream(stream.numbers, tokens=tokens)
        assert sse.native_text(frames) == undisturbed(asked, tokens=tokens)
        assert (await http.get(f"/tasks/{task_id}")).json()["attempts"] == 1
        fault.hits = tokens - lapsed
    await frail.quiet()
