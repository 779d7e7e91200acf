"""F7 and F8: a stop holds, whenever it comes, and says truly how the task ended."""

import asyncio
import signal
from collections import Counter
from collections.abc import Sequence

import httpx
import pytest
from tests.support import sse
from tests.support.fault_report import FaultRun
from tests.support.faults import RUNS, fields_of, held, owners, prompt, submit, watch, written
from tests.support.local_fleet import LocalFleet
from tests.support.native import read

from millstream.shared.keys import Keys

TOKENS = 4
RACES = 500 if RUNS > 1 else 120
AT_ONCE = 60
# From next to none to ample time for a stop, so that each side wins whatever the machine's load.
RATES = (500, 100, 20, 10)
UNBOUNDED = httpx.Limits()


@pytest.mark.fault("F7 stop before the start")
async def test_a_task_stopped_before_any_worker_never_runs(
    fleet: LocalFleet, fault: FaultRun
) -> None:
    pods = await asyncio.gather(fleet.api(model="fake"), fleet.api(model="fake"))
    async with (
        httpx.AsyncClient(base_url=pods[0].url, timeout=20) as http,
        httpx.AsyncClient(base_url=pods[1].url, timeout=20) as other,
    ):
        task_ids = [await submit(http, prompt(tokens=5)) for _ in range(10)]
        kept = await submit(http, prompt(tokens=5))
        streams = [watch(http, task_id) for task_id in task_ids]
        await asyncio.gather(*(stream.__aenter__() for stream in streams))
        for task_id in task_ids:
            answers = await asyncio.gather(
                *(client.post(f"/tasks/{task_id}/stop") for client in (http, other) * 5)
            )
            assert {answer.status_code for answer in answers} == {200}
            for answer in answers:
                stopped = answer.json()
                assert stopped["status"] == "cancelled"
                assert stopped["usage"]["completion_tokens"] == 0
        for stream in streams:
            frames = await stream.end()
            assert [(frame.id, frame.event) for frame in frames] == [("1", "cancelled")]
        assert await fleet.redis.xlen(Keys(0).queue("fake")) == 1
        await fleet.worker()
        assert (await read(http, kept))[-1].event == "completed"
        for task_id in task_ids:
            task = (await http.get(f"/tasks/{task_id}")).json()
            assert (task["status"], task["attempts"], task["text"]) == ("cancelled", 0, "")
            fault.hits += 1
    await fleet.quiet()
    assert await owners(fleet) == {}


@pytest.mark.fault("F8 stop while it finishes")
@pytest.mark.timeout(60)
async def test_a_stop_that_races_the_end_leaves_exactly_one(
    fleet: LocalFleet, fault: FaultRun
) -> None:
    api, _ = await asyncio.gather(fleet.api(max_queue=1000), fleet.worker())
    async with httpx.AsyncClient(base_url=api.url, timeout=25, limits=UNBOUNDED) as http:

        async def race(number: int, rates: Sequence[float] = RATES) -> str:
            """Stop a task when its last token but one, its last or its end has been seen."""
            asked = prompt(tokens=TOKENS, rate=rates[number % len(rates)])
            async with watch(http, await submit(http, asked)) as stream:
                await stream.upto(TOKENS - 1 + number % 3)
                told = (await http.post(f"/tasks/{stream.task_id}/stop")).json()
                frames = await stream.end()
            sse.check_native(frames)
            end = frames[-1]
            assert told["status"] == end.event
            assert told["usage"] == end.json["usage"]
            assert told["usage"]["completion_tokens"] == len(frames) - 1
            if end.event == "completed":
                assert len(frames) == TOKENS + 1
            again = (await http.post(f"/tasks/{stream.task_id}/stop")).json()
            assert again == told
            return end.event

        ends: Counter[str] = Counter()
        for first in range(0, RACES, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, RACES))
            ends += Counter(await asyncio.gather(*map(race, numbers)))
        assert sum(ends.values()) == RACES
        if not ends["cancelled"]:  # a machine with so much to do that a stop needs more time still
            ends += Counter(await asyncio.gather(*(race(number, [0.5]) for number in range(3))))
        assert set(ends) == {"cancelled", "completed"}, "one side always won: no race"
        fault.hits += min(ends.values())
    await fleet.quiet()


@pytest.mark.fault("F8 stop at a known token")
async def test_a_stop_at_each_token_and_ten_at_once(fleet: LocalFleet, fault: FaultRun) -> None:
    api, _ = await asyncio.gather(fleet.api(), fleet.worker())
    async with httpx.AsyncClient(base_url=api.url, timeout=25, limits=UNBOUNDED) as http:
        counts = {await submit(http, held(at, tokens=9)): at for at in range(10)}
        await written(fleet, counts)
        for task_id, at in counts.items():
            answers = [
                answer.json()
                for answer in await asyncio.gather(
                    *(http.post(f"/tasks/{task_id}/stop") for _ in range(10))
                )
            ]
            assert answers == answers[:1] * 10
            # Nine of nine tokens without an end is stopped, not completed.
            assert answers[0]["status"] == "cancelled"
            assert answers[0]["usage"]["completion_tokens"] == at
            frames = await read(http, task_id)
            sse.check_native(frames)
            assert [frame.event for frame in frames] == ["token"] * at + ["cancelled"]
            fault.hits += 1
    await fleet.quiet(within_s=2)


@pytest.mark.fault("F8 stop while the owner is dead")
async def test_a_task_stopped_on_a_dead_worker_is_never_taken_over(
    fleet: LocalFleet, fault: FaultRun
) -> None:
    api, first = await asyncio.gather(fleet.api(), fleet.worker())
    async with httpx.AsyncClient(base_url=api.url, timeout=25, limits=UNBOUNDED) as http:
        counts = {await submit(http, held(at, tokens=9)): at for at in (0, 4, 9)}
        sibling = await submit(http, held(5, tokens=9))
        await written(fleet, {**counts, sibling: 5})
        await fleet.worker()
        streams = [watch(http, task_id) for task_id in counts]
        await asyncio.gather(*(stream.__aenter__() for stream in streams))
        first.signal(signal.SIGKILL)
        await first.ended()
        for task_id, at in counts.items():
            stopped = (await http.post(f"/tasks/{task_id}/stop")).json()
            assert stopped["status"] == "cancelled"
            assert stopped["usage"]["completion_tokens"] == at
        for stream in streams:  # at once: nobody waits for the lease
            assert (await asyncio.wait_for(stream.end(), 1))[-1].event == "cancelled"
        assert (await read(http, sibling))[-1].event == "completed"  # the lease has lapsed by now
        assert (await fields_of(fleet, sibling))["attempt"] == "2"
        for task_id, at in counts.items():
            fields = await fields_of(fleet, task_id)
            assert (fields["state"], fields["attempt"]) == ("cancelled", "1")
            assert await fleet.redis.xlen(Keys(0).log(task_id)) == at + 1
            fault.hits += 1
        # There is one caller until API keys exist, so a foreign task is one that is not there.
        for method, path in (("POST", "/tasks/{}/stop"), ("DELETE", "/tasks/{}")):
            answer = await http.request(method, path.format("t0-" + "a" * 26))
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "task_not_found")
    await fleet.quiet()
