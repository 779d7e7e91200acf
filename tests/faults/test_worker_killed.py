"""F1: a worker is killed at a known token, and another goes on as if nothing had been."""

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from tests.support import sse
from tests.support.fault_report import FaultRun
from tests.support.faults import (
    KILL_BAR_S,
    SLACK_S,
    Watched,
    busy,
    fields_of,
    held,
    prompt,
    submit,
    undisturbed,
    watch,
    watch_chat,
    written,
)
from tests.support.local_fleet import LocalFleet

PREFILL_S = min(3.5 * busy(), 8)  # a fresh worker is ready before it is over


@dataclass(frozen=True)
class Case:
    """A kind of answer, and after which of its tokens to kill."""

    tokens: int
    at: list[int]
    text: str = ""
    """What must come out; '' for words, which the prompt decides."""
    directive: dict[str, object] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    finish: str = "stop"
    more_events: int = 0
    """Events with text and without tokens."""


@dataclass
class Victim:
    """A task that stands still, and the stream that shows it."""

    case: Case
    at: int
    asked: str
    chat: bool
    stream: Watched
    task_id: str

    def check(self) -> None:
        """The answer is what an undisturbed run gives."""
        case, frames = self.case, list(self.stream.frames)
        expected = case.text or undisturbed(
            self.asked, tokens=case.tokens, seed=case.fields.get("seed", 0), chat=self.chat
        )
        if self.chat:
            usage = frames.pop(-2).json["usage"]
            text = sse.chat_text(frames)
            finish = frames[-2].json["choices"][0]["finish_reason"]
        else:
            sse.check_native(frames)
            text, end = sse.native_text(frames), frames[-1].json
            usage, finish = end["usage"], end["finish_reason"]
        assert (text, finish) == (expected, case.finish), self.asked
        assert usage["completion_tokens"] == case.tokens


CASES = [
    Case(200, [1, 2, 100, 199, 200], directive={"tokens": 200}),
    Case(30, [15, 30], directive={"tokens": 30}, fields={"seed": 11, "temperature": 0.8}),
    # Four, two and three bytes a character, a token a byte: most kills cut one in two.
    Case(
        13,
        [*range(1, 14)],
        "😀é€😀",
        {"bytes": ["f0", "9f", "98", "80", "c3", "a9", "e2", "82", "ac", "f0", "9f", "98", "80"]},
    ),
    # The stop string begins three times, and is there the third time.
    Case(
        6,
        [*range(1, 6)],
        "one lo, two lo ",
        {"texts": ["one l", "o,", " two l", "o l", "o", "w x", " never"]},
        {"stop": ["low"]},
    ),
    # What might have become the stop string comes out at the end.
    Case(3, [1, 2, 3], "hello", {"texts": ["he", "l", "lo"]}, {"stop": ["lows"]}, more_events=1),
    Case(7, [*range(1, 7)], "", {"tokens": 100}, {"max_tokens": 7}, "length"),
]
PREFILL = Case(20, [0], directive={"tokens": 20, "delay_s": PREFILL_S})


async def begin(
    stack: AsyncExitStack, http: httpx.AsyncClient, case: Case, at: int, *, chat: bool
) -> Victim:
    asked = held(at, **case.directive) if at else prompt(**case.directive)
    if chat:
        stream = watch_chat(http, asked, stream_options={"include_usage": True}, **case.fields)
        await stack.enter_async_context(stream)
        return Victim(case, at, asked, True, stream, stream.task_id)
    task_id = await submit(http, asked, **case.fields)
    stream = await stack.enter_async_context(watch(http, task_id))
    return Victim(case, at, asked, False, stream, task_id)


@pytest.mark.fault("F1 worker killed", bar_s=KILL_BAR_S)
async def test_text_goes_on_from_every_token(fleet: LocalFleet, fault: FaultRun) -> None:
    api, first = await asyncio.gather(fleet.api(), fleet.worker())
    async with (
        httpx.AsyncClient(base_url=api.url, timeout=25, limits=httpx.Limits()) as http,
        AsyncExitStack() as stack,
    ):
        victims = [
            await begin(stack, http, case, at, chat=chat)
            for case in CASES
            for at in case.at
            for chat in (False, True)
        ]
        counts = {victim.task_id: victim.at for victim in victims}
        await written(fleet, counts)
        prefills = [await begin(stack, http, PREFILL, 0, chat=chat) for chat in (False, True)]
        await written(fleet, {victim.task_id: 0 for victim in prefills})
        await fleet.worker()
        for victim in victims:
            if not victim.chat:
                await victim.stream.upto(victim.at)
        assert [(await fields_of(fleet, victim.task_id))["seq"] for victim in prefills] == ["0"] * 2
        struck = time.monotonic()
        first.signal(signal.SIGKILL)
        for victim in victims + prefills:
            frames = await victim.stream.end()
            victim.check()
            assert any("ping" in frame.comments for frame in frames)
            if not victim.chat:
                events = victim.case.tokens + victim.case.more_events
                fault.stream(victim.stream.numbers, tokens=events)
            if victim.at:
                fault.gaps_s.append(victim.stream.gap_after(struck))
            task = (await http.get(f"/tasks/{victim.task_id}")).json()
            assert task["attempts"] == 2, "the kill did not hit"
            assert task["usage"]["completion_tokens"] == victim.case.tokens
            fault.hits += 1
        assert max(fault.gaps_s) < KILL_BAR_S + SLACK_S
    assert await first.ended() == -signal.SIGKILL
    await fleet.quiet()


@pytest.mark.fault("F1 workers killed one after the other", bar_s=KILL_BAR_S)
async def test_three_deaths_in_a_row(fleet: LocalFleet, fault: FaultRun) -> None:
    api, *_ = await asyncio.gather(fleet.api(), *(fleet.worker() for _ in range(4)))
    asked = held(20, 21, 59, tokens=60)
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        task_id = await submit(http, asked)
        async with watch(http, task_id) as stream:
            for at in (20, 21, 59):
                await stream.upto(at)
                await written(fleet, {task_id: at})
                owner = await fleet.owner(task_id)
                struck = time.monotonic()
                owner.signal(signal.SIGKILL)
                await stream.upto(at + 1)
                fault.gaps_s.append(stream.gap_after(struck))
                fault.hits += 1
            frames = await stream.end()
        sse.check_native(frames)
        fault.stream(stream.numbers, tokens=60)
        assert sse.native_text(frames) == undisturbed(asked, tokens=60)
        assert frames[-1].json["usage"]["completion_tokens"] == 60
        assert (await http.get(f"/tasks/{task_id}")).json()["attempts"] == 4
    await fleet.quiet()
