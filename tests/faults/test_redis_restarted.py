"""F11: Redis is restarted under load: refused early, waited for, and gone on from."""

import asyncio
import time
from contextlib import AsyncExitStack

import httpx
import pytest
from tests.support import sse
from tests.support.fault_report import FaultRun
from tests.support.faults import prompt, submit, undisturbed, watch, watch_chat
from tests.support.local_fleet import LocalFleet
from tests.support.native import read
from tests.support.store import Store
from tests.support.waiting import until

STREAMS, CHATS = 40, 20
SLOTS = 16  # of each of two workers, so that tasks wait when Redis goes
STRUCK_AT = 20
CALLERS = 4  # for each pod
ANSWERED_WITHIN_S = 5.0
ASKED = prompt(tokens=60, rate=40)
SMALL = prompt(tokens=5)


class Caller:
    """Hands in one small task after the other, and notes how each was answered."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.accepted: list[str] = []
        self.refused = 0
        self.since_refused = 0
        """Tasks accepted since the last refusal."""

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            answer = await self._http.post("/tasks", json={"prompt": SMALL})
            assert time.monotonic() - began < ANSWERED_WITHIN_S
            if answer.status_code == 503:
                assert int(answer.headers["retry-after"]) >= 1
                self.refused += 1
                self.since_refused = 0
            else:
                assert answer.status_code == 202, answer.text
                self.accepted.append(answer.json()["task_id"])
                self.since_refused += 1
            await asyncio.sleep(0.05)  # its pace


@pytest.mark.fault("F11 Redis restarted")
async def test_a_restart_of_redis_under_load(
    store: Store, frail: LocalFleet, fault: FaultRun
) -> None:
    settings = {"max_concurrent": SLOTS}
    one, two, *_ = await asyncio.gather(
        frail.api(), frail.api(), frail.worker(**settings), frail.worker(**settings)
    )
    async with AsyncExitStack() as stack:
        pods = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=pod.url, timeout=25, limits=httpx.Limits())
            )
            for pod in (one, two)
        ]
        task_ids = [await submit(pods[0], ASKED) for _ in range(STREAMS)]
        streams = [
            await stack.enter_async_context(watch(pods[number % 2], task_id))
            for number, task_id in enumerate(task_ids)
        ]
        chats = [
            await stack.enter_async_context(watch_chat(pods[number % 2], ASKED))
            for number in range(CHATS)
        ]
        callers = [Caller(pod) for pod in pods for _ in range(CALLERS)]
        async with asyncio.TaskGroup() as load:
            calls = [load.create_task(caller.run()) for caller in callers]
            await streams[0].upto(STRUCK_AT)
            struck = time.monotonic()
            store.end()
            await until(lambda: all(caller.refused for caller in callers))
            # Two, since the first may have been on its way.
            opened = [stream for stream in streams + chats if not stream.reading.done()]
            await until(
                lambda: all(sum(at > struck for at in stream.pings) >= 2 for stream in opened)
            )
            for pod in pods:
                assert (await pod.get("/health")).status_code == 200
                assert (await pod.get("/ready")).status_code == 503
            store.start()
            back = time.monotonic()
            # Without anybody's doing: all go on at once, and tasks are taken again.
            await until(lambda: all(caller.since_refused >= 3 for caller in callers))
            for call in calls:
                call.cancel()
        fault.hits = len(opened)
        for stream in streams:
            frames = await stream.end()
            sse.check_native(frames)
            fault.stream(stream.numbers, tokens=60)
            assert sse.native_text(frames) == undisturbed(ASKED, tokens=60)
        for chat in chats:
            assert sse.chat_text(await chat.end()) == undisturbed(ASKED, tokens=60, chat=True)
        fault.gaps_s += [stream.gap_after(back) for stream in opened]
        accepted = [task_id for caller in callers for task_id in caller.accepted]
        for frames in await asyncio.gather(*(read(pods[0], task_id) for task_id in accepted)):
            sse.check_native([frame for frame in frames if frame.event != "queued"])
            assert sse.native_text(frames) == undisturbed(SMALL, tokens=5)
    for process in frail.processes:
        assert process.text().count("\n") < 30, process.text()
        assert "NOSCRIPT" not in process.text()
        assert "NOGROUP" not in process.text()
    await frail.quiet()
