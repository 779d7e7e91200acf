"""Redis comes back older than it was (I15): what was shown stays, or its reader is told."""

import asyncio
import signal
from typing import Any

import httpx
from tests.support import sse
from tests.support.local_fleet import Api, LocalFleet, Process
from tests.support.native import read, submit
from tests.support.store import Store
from tests.support.waiting import eventually

from millstream.shared.keys import Keys
from millstream.shared.steps import AppendRow


class Reading:
    """A stream read in the background, so that a test can act at a known event."""

    def __init__(self, http: httpx.AsyncClient, task_id: str) -> None:
        self.frames: list[sse.Frame] = []
        self._task = asyncio.create_task(self._read(http, task_id))

    async def _read(self, http: httpx.AsyncClient, task_id: str) -> None:
        async with http.stream("GET", f"/tasks/{task_id}/stream") as answer:
            async for frame in sse.frames(answer.aiter_lines()):
                if frame.event != "queued":
                    self.frames.append(frame)

    async def has(self, count: int) -> None:
        async def look() -> bool:
            return len(self.frames) >= count or self._task.done()

        await eventually(look, what=f"{count} events")

    async def ended(self, within_s: float = 20) -> list[sse.Frame]:
        async with asyncio.timeout(within_s):
            await self._task
        return self.frames


async def length(frail: LocalFleet, task_id: str) -> int:
    return await frail.redis.xlen(Keys(0).log(task_id))


async def whole(frail: LocalFleet, task_id: str, count: int) -> None:
    async def look() -> bool:
        return await length(frail, task_id) >= count

    await eventually(look, what="the log to be whole again")


def freeze(*processes: Process) -> None:
    for process in processes:
        process.signal(signal.SIGSTOP)


def wake(*processes: Process) -> None:
    for process in processes:
        process.signal(signal.SIGCONT)


async def test_a_worker_writes_again_what_was_lost(frail: LocalFleet, store: Store) -> None:
    api = await frail.api(keepalive_s=0.5)
    worker = await frail.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        expected = sse.native_text(await read(http, await submit(http, tokens=60, rate=40)))
        for kept in (0, 10):  # its claim is lost as well, or tokens alone
            freeze(worker)
            task_id = await submit(http, tokens=60, rate=40)
            reading = Reading(http, task_id)
            if kept:
                wake(worker)
                await reading.has(kept)
            mark = store.mark()
            wake(worker)
            await reading.has(kept + 20)
            freeze(api, worker)
            store.lose_since(mark)
            store.start()
            assert kept <= await length(frail, task_id) < kept + 20
            wake(worker)
            await whole(frail, task_id, kept + 20)
            wake(api)
            frames = await reading.ended()
            sse.check_native(frames)
            assert sse.native_text(frames) == expected
            assert (await http.get(f"/tasks/{task_id}")).json()["attempts"] == 1
    await frail.quiet()


async def test_a_pod_puts_back_what_it_has_told(frail: LocalFleet, store: Store) -> None:
    """The workers are gone: nobody but the pod knows what Redis had acknowledged."""
    api = await frail.api(keepalive_s=0.5)
    worker = await frail.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        expected = sse.native_text(await read(http, await submit(http, tokens=60, rate=30)))
        running = await submit(http, tokens=60, rate=30)
        stopped = await submit(http, tokens=1000, rate=30)
        response = {"input": '@fake {"tokens": 1000, "rate": 30}', "background": True}
        deleted = (await http.post("/v1/responses", json=response)).json()["id"]
        ended = await submit(http, tokens=20, rate=30)
        reading, short = Reading(http, running), Reading(http, ended)
        await reading.has(10)
        mark = store.mark()
        assert (await http.post(f"/tasks/{stopped}/stop")).json()["status"] == "cancelled"
        assert (await http.delete(f"/v1/responses/{deleted}")).status_code == 200
        await short.ended()
        await reading.has(25)
        worker.kill()
        freeze(api)
        seen = await length(frail, running)
        store.lose_since(mark)
        store.start()
        assert await length(frail, running) < 25
        assert await length(frail, ended) < 21
        assert await length(frail, deleted.removeprefix("resp_")) > 0
        wake(api)
        await whole(frail, running, len(reading.frames))
        for task_id, state in ((ended, "completed"), (stopped, "cancelled")):

            async def as_told(task_id: str = task_id, state: str = state) -> bool:
                return (await http.get(f"/tasks/{task_id}")).json()["status"] == state

            await eventually(as_told, what=f"{state} again")

        async def gone() -> bool:
            return (await http.get(f"/v1/responses/{deleted}")).status_code == 404

        await eventually(gone, what="the deleted response to go again")
        again = await read(http, ended)
        assert [(f.id, f.data) for f in again] == [(f.id, f.data) for f in short.frames]
        assert await length(frail, running) <= seen
        await frail.worker()
        frames = await reading.ended()
        sse.check_native(frames)
        assert sse.native_text(frames) == expected
        assert (await http.get(f"/tasks/{running}")).json()["attempts"] == 2
    await frail.quiet()


async def stopped_then_lost(
    frail: LocalFleet, store: Store, *, reader: Api, asked: Api, worker: Process
) -> tuple[str, dict[str, Any]]:
    """A task of 25 tokens or more, stopped; Redis is down and has 10 to 24 of them, no stop.

    Its id, and what the stop was answered.
    """
    async with httpx.AsyncClient(timeout=25) as http, httpx.AsyncClient(base_url=reader.url) as one:
        task_id = await submit(one, tokens=1000, rate=30)
        reading = Reading(one, task_id)
        await reading.has(10)
        mark = store.mark()
        await reading.has(25)
        answer = await http.post(f"{asked.url}/tasks/{task_id}/stop")
        assert (await reading.ended())[-1].event == "cancelled"

        async def dropped() -> bool:
            return all(info.running == 0 for info in await frail.workers())

        await eventually(dropped, what="the worker to hear of the stop")
        freeze(reader, asked, worker)
        store.lose_since(mark)
    return task_id, answer.json()


async def told_again(api: Api, task_id: str, told: dict[str, Any]) -> None:
    """The task ends as its caller was told, with all its text."""
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:

        async def as_told() -> dict[str, Any] | None:
            task = (await http.get(f"/tasks/{task_id}")).json()
            return task if task.get("status") == "cancelled" else None

        task = await eventually(as_told, what="the stop to hold again")
        assert {**task, **told} == task
        frames = await read(http, task_id)
        sse.check_native(frames)
        assert len(frames) == told["usage"]["completion_tokens"] + 1


async def test_a_worker_puts_back_a_stop_whose_pod_died(frail: LocalFleet, store: Store) -> None:
    api, worker = await frail.api(keepalive_s=0.5), await frail.worker()
    task_id, told = await stopped_then_lost(frail, store, reader=api, asked=api, worker=worker)
    api.kill()
    store.start()
    assert 10 <= await length(frail, task_id) < 25
    wake(worker)
    await told_again(await frail.api(), task_id, told)
    await frail.quiet()


async def test_a_stop_is_put_back_behind_the_text_that_another_pod_has(
    frail: LocalFleet, store: Store
) -> None:
    """It ended the shortened log, and the readers of what was missing got `log_rewound`."""
    reader, asked = await frail.api(keepalive_s=0.5), await frail.api(keepalive_s=0.5)
    worker = await frail.worker()
    task_id, told = await stopped_then_lost(frail, store, reader=reader, asked=asked, worker=worker)
    worker.kill()
    store.start()
    wake(asked)

    async def listens() -> bool:
        return await frail.redis.execute_command("PUBSUB", "SHARDCHANNELS", "*:pod:*") != []

    await eventually(listens, what="the pod that was asked to be connected again")
    async with httpx.AsyncClient(base_url=asked.url) as http:  # by now it has looked at the log
        assert (await http.get(f"/tasks/{task_id}")).json()["status"] == "running"
    wake(reader)
    await told_again(reader, task_id, told)
    await told_again(asked, task_id, told)
    await frail.quiet()


async def test_a_stop_waits_for_text_that_nobody_has_for_seconds_only(
    frail: LocalFleet, store: Store
) -> None:
    reader, asked = await frail.api(keepalive_s=0.5), await frail.api(keepalive_s=0.5)
    worker = await frail.worker()
    task_id, told = await stopped_then_lost(frail, store, reader=reader, asked=asked, worker=worker)
    worker.kill()
    reader.kill()
    store.start()
    wake(asked)
    async with httpx.AsyncClient(base_url=asked.url) as http:

        async def stopped() -> bool:
            return (await http.get(f"/tasks/{task_id}")).json()["status"] == "cancelled"

        await eventually(stopped, what="the stop to hold again")
    assert await length(frail, task_id) <= told["usage"]["completion_tokens"]
    await frail.quiet()


async def test_who_saw_other_bytes_is_told(frail: LocalFleet, store: Store) -> None:
    """The pod comes too late: another worker has gone on, and its model chose other words."""
    api = await frail.api(keepalive_s=0.5)
    worker = await frail.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        freeze(worker)
        task_id = await submit(http, tokens=100, rate=30)
        mark = store.mark()
        reading = Reading(http, task_id)
        wake(worker)
        await reading.has(10)
        worker.kill()
        freeze(api)
        store.lose_since(mark)
        store.start()
        (claim,), _ = await frail.scripts.claim(
            Keys(0), worker="other", model="fake", free=1, running=0, lease_s=0, max_attempts=3,
            live_ttl_s=100, result_ttl_s=100, max_task_s=100, sweep=True,
        )  # fmt: skip
        assert claim.log == []
        events = [(str(n), f'"other {n}"') for n in range(1, 31)]
        rows = [AppendRow(task_id, claim.attempt, 1, 1, events, "completed", "stop")]
        await frail.scripts.append(
            Keys(0), worker="other", model="fake", result_ttl_s=100, rows=rows
        )
        wake(api)
        frames = await reading.ended()
        assert frames[-1].event == "error"
        assert frames[-1].json["error"]["code"] == "log_rewound"
        numbers = [int(frame.id or 0) for frame in frames[:-1]]
        assert numbers == list(range(1, len(numbers) + 1))
        assert not any("other" in frame.data for frame in frames)
        # Nor does it go on as if nothing had been when the reader comes back, on any pod.
        for number in (1, len(numbers)):
            answer = await http.get(f"/tasks/{task_id}/stream?last_event_id={number}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (410, "log_rewound")
        assert len(await read(http, task_id)) == 31  # from the beginning: the text that holds
    await frail.quiet()
