"""F14: subscriptions are cut again and again: the log is the truth, and messages only hints."""

import asyncio
import time
from contextlib import AsyncExitStack
from itertools import pairwise

import httpx
import pytest
from tests.support import sse
from tests.support.fault_report import FaultRun
from tests.support.faults import SLACK_S, prompt, submit, undisturbed, watch, watch_chat
from tests.support.local_fleet import LocalFleet
from tests.support.native import read

CUTTING_S, EVERY_S = 10.0, 0.2
POLL_S = 1.25  # the longest: what a lost bell costs
TOKENS, RATE = 210, 20
ASKED = prompt(tokens=TOKENS, rate=RATE)
SMALL = prompt(tokens=3)


@pytest.mark.fault("F14 subscriptions cut", bar_s=POLL_S)
async def test_cut_subscriptions_lose_nothing(frail: LocalFleet, fault: FaultRun) -> None:
    api, *_ = await asyncio.gather(frail.api(), frail.worker(), frail.worker())
    async with (
        httpx.AsyncClient(base_url=api.url, timeout=25, limits=httpx.Limits()) as http,
        AsyncExitStack() as stack,
    ):
        streams = [
            await stack.enter_async_context(watch(http, await submit(http, ASKED)))
            for _ in range(6)
        ]
        chats = [await stack.enter_async_context(watch_chat(http, ASKED)) for _ in range(6)]
        await streams[0].upto(1)
        until = time.monotonic() + CUTTING_S
        small: list[asyncio.Task[list[sse.Frame]]] = []
        while time.monotonic() < until:
            fault.hits += await frail.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            # Its bell may be lost as well.
            small.append(asyncio.create_task(read(http, await submit(http, SMALL))))
            await asyncio.wait(small, timeout=EVERY_S)
        assert fault.hits > 3 * CUTTING_S  # the pod's and both workers', more than once a second
        for frames in await asyncio.gather(*small):
            sse.check_native([frame for frame in frames if frame.event != "queued"])
            assert sse.native_text(frames) == undisturbed(SMALL, tokens=3)
        for stream in streams:
            frames = await stream.end()
            sse.check_native(frames)
            fault.stream(stream.numbers, tokens=TOKENS)
            assert sse.native_text(frames) == undisturbed(ASKED, tokens=TOKENS)
            assert (await http.get(f"/tasks/{stream.task_id}")).json()["attempts"] == 1
        for chat in chats:
            text = sse.chat_text(await chat.end())
            assert text == undisturbed(ASKED, tokens=TOKENS, chat=True)
        fault.gaps_s += [
            max(later - earlier for earlier, later in pairwise(stream.times))
            for stream in streams + chats
        ]
        assert max(fault.gaps_s) < POLL_S + SLACK_S
        # The stop's hint is lost with them as well; the stop is not.
        endless = await submit(http, prompt(tokens=100_000, rate=20))
        await frail.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        assert (await http.post(f"/tasks/{endless}/stop")).json()["status"] == "cancelled"
    await frail.quiet()
