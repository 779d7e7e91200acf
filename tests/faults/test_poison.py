"""F10: a task that kills each worker it meets ends by itself, and takes nobody along."""

import asyncio
import time

import httpx
import pytest
from tests.support import sse
from tests.support.fault_report import FaultRun
from tests.support.faults import busy, prompt, submit, undisturbed, watch
from tests.support.local_fleet import LocalFleet

from millstream.shared.keys import Keys
from millstream.worker.engines.fake import CRASH_EXIT_CODE

DEATHS = 3  # MAX_ATTEMPTS
LEASE_S = 1
NORMAL, TOKENS = 30, 60


@pytest.mark.fault("F10 poison task")
async def test_a_poison_task_ends_alone(fleet: LocalFleet, fault: FaultRun) -> None:
    settings = {"lease_s": LEASE_S, "max_concurrent": 16}
    api, *workers = await asyncio.gather(
        fleet.api(**settings), *(fleet.worker(**settings) for _ in range(3))
    )
    asked, poisonous = prompt(tokens=TOKENS, rate=30), prompt(tokens=9, crash_at=5)
    async with httpx.AsyncClient(base_url=api.url, timeout=28, limits=httpx.Limits()) as http:
        good = [await submit(http, asked) for _ in range(NORMAL)]
        poison = await submit(http, poisonous)
        streams = [watch(http, task_id) for task_id in [*good, poison]]
        await asyncio.gather(*(stream.__aenter__() for stream in streams))
        ends = asyncio.gather(*(stream.end() for stream in streams))
        looked = time.monotonic()
        while not ends.done():
            dead = [worker for worker in workers if worker.popen.poll() is not None]
            # Unless this process was away for so long that one could follow the other, or a lease
            # lapsed while its worker lived, for want of time.
            excused = time.monotonic() - looked > LEASE_S or busy() > 2
            assert len(dead) <= 1 or excused, "more than one worker is down"
            looked = time.monotonic()
            for worker in dead:  # what a supervisor does
                assert worker.popen.returncode == CRASH_EXIT_CODE
                workers.remove(worker)
                fault.hits += 1
                workers.append(await fleet.worker(ready=False, **settings))
            await asyncio.wait({ends}, timeout=0.02)
        *normal, last = await ends
        assert fault.hits == DEATHS
        sse.check_native(last)
        assert [frame.event for frame in last] == ["token"] * 4 + ["failed"]
        error = last[-1].json["error"]
        assert (error["code"], error["type"]) == ("max_attempts", "server_error")
        assert (await http.get(f"/tasks/{poison}")).json()["attempts"] == DEATHS
        expected = undisturbed(asked, tokens=TOKENS)
        for stream, frames in zip(streams, normal, strict=False):
            sse.check_native(frames)
            fault.stream(stream.numbers, tokens=TOKENS)
            assert frames[-1].event == "completed"
            assert sse.native_text(frames) == expected
    ((_, entry),) = await fleet.redis.xrange(Keys(0).dead("fake"))
    assert (entry[b"task"].decode(), int(entry[b"lost"])) == (poison, DEATHS)
    assert b"crash_at" in entry[b"request"]
    await fleet.quiet()
