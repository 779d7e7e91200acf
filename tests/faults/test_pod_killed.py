"""F4: a pod is killed under its readers; another goes on from the number each of them has."""

import asyncio
import signal
import time

import httpx
import pytest
from tests.support import sse
from tests.support.fault_report import FaultRun
from tests.support.faults import (
    SLACK_S,
    held,
    prompt,
    submit,
    undisturbed,
    watch,
    watch_chat,
    written,
)
from tests.support.local_fleet import LocalFleet
from tests.support.waiting import eventually

from millstream.shared.keys import Keys

TOKENS, RATE = 60, 40
KILLED_AT = 10


@pytest.mark.fault("F4 pod killed")
async def test_readers_go_on_at_another_pod(fleet: LocalFleet, fault: FaultRun) -> None:
    first, second, _ = await asyncio.gather(fleet.api(), fleet.api(), fleet.worker())
    asked = prompt(tokens=TOKENS, rate=RATE)
    async with (
        httpx.AsyncClient(base_url=first.url, timeout=20) as one,
        httpx.AsyncClient(base_url=second.url, timeout=20) as two,
    ):
        task_id = await submit(one, asked)
        streams = [watch(one, task_id) for _ in range(4)]
        await asyncio.gather(*(stream.__aenter__() for stream in streams))
        await asyncio.gather(*(stream.upto(1) for stream in streams))
        # All of them: what was sent and not yet read may be lost with the connection.
        await asyncio.gather(*(stream.upto(KILLED_AT) for stream in streams))
        first.signal(signal.SIGKILL)
        for stream in streams:
            with pytest.raises(httpx.TransportError):
                await stream.end()
            assert stream.frames[-1].event == "token"
            fault.hits += 1
        last = [stream.numbers[-1] for stream in streams]

        async def goes_on() -> bool:
            return await fleet.redis.xlen(Keys(0).log(task_id)) > max(last) + 3

        await eventually(goes_on, what="tokens that nobody reads")  # generation never paused
        back = time.monotonic()
        for stream, after in zip(streams, last, strict=True):
            async with watch(two, task_id, after) as rest:
                await rest.end()
            frames = stream.frames + rest.frames
            sse.check_native(frames)
            assert rest.numbers[0] == after + 1
            fault.stream(stream.numbers + rest.numbers, tokens=TOKENS)
            assert sse.native_text(frames) == undisturbed(asked, tokens=TOKENS)
        fault.gaps_s.append(rest.gap_after(back))
        assert fault.gaps_s[0] < SLACK_S
        task = (await two.get(f"/tasks/{task_id}")).json()
        assert (task["attempts"], task["usage"]["completion_tokens"]) == (1, TOKENS)
    await fleet.quiet()


async def test_where_a_reader_may_go_on(fleet: LocalFleet) -> None:
    first, second, _ = await asyncio.gather(fleet.api(), fleet.api(), fleet.worker())
    first.signal(signal.SIGKILL)
    async with httpx.AsyncClient(base_url=second.url, timeout=20) as http:
        task_id = await submit(http, held(20, tokens=21))
        url = f"/tasks/{task_id}/stream"
        await written(fleet, {task_id: 20})
        # Ahead of the log is an error also while the task runs: it must not wait for what may come.
        for given in ("21", "1000000", "abc", "-1", "7-0", "$"):
            answer = await http.get(url, params={"last_event_id": given})
            assert answer.status_code == 400, given
            assert answer.json()["error"]["code"] == "invalid_event_id"
            headed = await http.get(url, headers={"Last-Event-ID": given})
            assert headed.status_code == 400, given
        assert (await http.post(f"/tasks/{task_id}/stop")).json()["status"] == "cancelled"
        for after in (0, 1, 19, 20):
            by_header = await http.get(url, headers={"Last-Event-ID": str(after)})
            by_query = await http.get(url, params={"last_event_id": str(after)})
            # A browser repeats its first URL and adds the header, which is newer.
            by_both = await http.get(
                url, params={"last_event_id": "3"}, headers={"Last-Event-ID": str(after)}
            )
            frames = sse.parse(by_header.text)
            sse.check_native(frames, first=after + 1)
            assert [frame.id for frame in frames] == [str(n) for n in range(after + 1, 22)]
            assert by_query.text == by_header.text == by_both.text
        assert (await http.get(url, params={"last_event_id": "21"})).status_code == 204
        assert (await http.get(url, params={"last_event_id": "22"})).status_code == 400
        unknown = await http.get("/tasks/t0-" + "a" * 26 + "/stream", params={"last_event_id": "1"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "task_not_found")
    await fleet.quiet()


@pytest.mark.fault("F4 pod killed under a chat")
async def test_a_chat_is_cut_and_never_called_finished(fleet: LocalFleet, fault: FaultRun) -> None:
    first, second, _ = await asyncio.gather(fleet.api(), fleet.api(), fleet.worker())
    async with (
        httpx.AsyncClient(base_url=first.url, timeout=20) as one,
        httpx.AsyncClient(base_url=second.url, timeout=20) as two,
    ):
        async with watch_chat(one, held(20, tokens=20)) as stream:
            await stream.upto(21)  # the role comes first
            first.signal(signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                await stream.end()
        fault.hits += 1
        fault.stream([*range(1, len(stream.frames))], tokens=20)
        assert all('"finish_reason":"' not in frame.data for frame in stream.frames)
        assert all("[DONE]" not in frame.data for frame in stream.frames)
        stopped = (await two.post(f"/tasks/{stream.task_id}/stop")).json()
        assert (stopped["status"], stopped["usage"]["completion_tokens"]) == ("cancelled", 20)
    await fleet.quiet()
