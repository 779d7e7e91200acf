"""The limits' state on a real Valkey: exact over any number of pods, by Redis's clock."""

import asyncio
import time
from typing import Any

import pytest

from millstream.shared.keys import Keys, home_shard
from millstream.shared.limits import Admitted, Exceeded, LimitStore
from millstream.shared.scripts import Scripts
from millstream.shared.steps import AppendRow, Submitted

SHARDS = 2
ANN = next(name for name in ("ann", "anna", "anne") if home_shard(name, SHARDS) == 0)


class Bench:
    """The store, with short windows, and tasks that end as told."""

    def __init__(self, scripts: Scripts) -> None:
        self.scripts = scripts
        self.store = LimitStore(scripts.runner, shards=SHARDS, lease_s=0.2)
        self.client: Any = scripts.runner.client
        self.number = 0

    async def admit(self, **changes: Any) -> Admitted | Exceeded:
        self.number += 1
        arguments = {
            "request_id": f"r{self.number}",
            "requests_per_min": 0,
            "tokens_per_min": 0,
            "prompts": [0],
            "max_tokens": None,
            **changes,
        }
        return await self.store.admit(ANN, **arguments)

    async def tokens_used(self) -> int:
        """As the caller would be told with its next request."""
        answer = await self.admit(tokens_per_min=100_000, max_tokens=1)
        assert isinstance(answer, Admitted)
        await self.store.give_back(ANN, answer)
        assert answer.standing.tokens is not None
        return answer.standing.tokens.used - 1

    async def end(self, admitted: Admitted, shard: int, *, tokens: int) -> None:
        """A task of the request runs on a shard and makes so many tokens, of a prompt of 7."""
        keys = Keys(shard)
        answer = await self.scripts.submit(
            keys,
            task_id=f"t{shard}-{admitted.id}",
            model="m",
            caller=ANN,
            request=b"{}",
            max_queue=9,
            live_ttl_s=100,
            reserved=admitted.reserved,
            admitted_ms=admitted.at_ms,
        )
        assert isinstance(answer, Submitted)
        lives = {"live_ttl_s": 100, "result_ttl_s": 10, "max_task_s": 60, "lease_s": 9}
        (claim,), _ = await self.scripts.claim(
            keys, worker="w", model="m", free=1, running=0, max_attempts=3, sweep=False, **lives
        )
        events = [(str(n), '"x"') for n in range(tokens)]
        row = AppendRow(claim.task_id, claim.attempt, 7, 1, events, "completed", "stop")
        for _ in range(2):
            await self.scripts.append(keys, worker="w", model="m", result_ttl_s=10, rows=[row])


@pytest.fixture
def bench(scripts: Scripts) -> Bench:
    return Bench(scripts)


async def test_no_window_of_time_holds_more_than_the_limit(bench: Bench) -> None:
    limit, window_s = 7, 0.25
    admitted: list[int] = []

    async def hammer() -> None:
        while len(admitted) < 5 * limit:
            answer = await bench.admit(requests_per_min=limit, window_s=window_s)
            if isinstance(answer, Admitted):
                admitted.append(answer.at_ms)

    await asyncio.gather(*(hammer() for _ in range(8)))
    admitted.sort()
    gaps = [later - first for first, later in zip(admitted, admitted[limit:], strict=False)]
    assert min(gaps) > window_s * 1000


async def test_who_comes_back_when_told_gets_in(bench: Bench) -> None:
    for of in ({"requests_per_min": 3}, {"tokens_per_min": 30, "max_tokens": 10}):
        limits = {**of, "window_s": 0.3}
        for left in (2, 1, 0):
            answer = await bench.admit(**limits)
            assert isinstance(answer, Admitted)
            (window,) = filter(None, (answer.standing.requests, answer.standing.tokens))
            assert window.remaining == left * (10 if "max_tokens" in of else 1)
            assert 0.25 < window.reset_s <= 0.301
        refused = await bench.admit(**limits)
        assert isinstance(refused, Exceeded)
        assert refused.limit == ("tokens" if "max_tokens" in of else "requests")
        assert 0 < refused.retry_after_s <= 0.301
        await asyncio.sleep(refused.retry_after_s)
        assert isinstance(await bench.admit(**limits), Admitted)


async def test_both_limits_or_neither(bench: Bench) -> None:
    limits = {"requests_per_min": 5, "tokens_per_min": 100, "max_tokens": 60}
    first = await bench.admit(**limits)
    assert isinstance(first, Admitted)
    assert isinstance(await bench.admit(**limits), Exceeded)
    small = await bench.admit(**{**limits, "max_tokens": 40})
    assert isinstance(small, Admitted)
    assert small.standing.requests is not None
    assert small.standing.requests.used == 2
    for admitted in (first, first, small):
        await bench.store.give_back(ANN, admitted)
    again = await bench.admit(**{**limits, "max_tokens": 100})
    assert isinstance(again, Admitted)
    assert again.standing.requests is not None
    assert again.standing.requests.used == 1


async def test_a_request_sent_again_after_a_lost_answer_counts_once(bench: Bench) -> None:
    limits = {"requests_per_min": 1, "tokens_per_min": 9, "max_tokens": 9, "request_id": "same"}
    first = await bench.admit(**limits)
    assert isinstance(first, Admitted)
    assert first.reserved == ("same.0:9",)
    for _ in range(2):
        again = await bench.admit(**limits)
        assert isinstance(again, Admitted)
        assert (again.reserved, again.at_ms) == (first.reserved, first.at_ms)
        assert again.standing.requests is not None
        assert again.standing.requests.used == 1


@pytest.mark.parametrize("shard", [0, 1])
async def test_what_was_reserved_is_settled_once(bench: Bench, shard: int) -> None:
    admitted = await bench.admit(tokens_per_min=1000, prompts=[10], max_tokens=500)
    assert isinstance(admitted, Admitted)
    assert await bench.tokens_used() == 510
    await bench.end(admitted, shard, tokens=5)
    told = await bench.client.hgetall(Keys(shard).ended(ANN))
    assert len(told) == 1
    assert await bench.tokens_used() == 12
    assert await bench.client.exists(Keys(shard).ended(ANN)) == 0
    # A pod that died before it could say that it had settled: it is told again.
    await bench.client.hset(Keys(shard).ended(ANN), mapping=told)
    assert await bench.tokens_used() == 12


async def test_each_choice_is_settled_for_itself(bench: Bench) -> None:
    admitted = await bench.admit(
        requests_per_min=9, tokens_per_min=1000, prompts=[1, 2, 3], max_tokens=100
    )
    assert isinstance(admitted, Admitted)
    assert await bench.tokens_used() == 306
    answer = await bench.scripts.submit(
        Keys(0), task_id="t0-a", model="m", caller=ANN, request=b"{}", max_queue=9, live_ttl_s=99,
        more=[("t0-b", b"{}"), ("t0-c", b"{}")],
        reserved=admitted.reserved, admitted_ms=admitted.at_ms,
    )  # fmt: skip
    assert isinstance(answer, Submitted)
    for task_id, left in (("t0-b", 204), ("t0-c", 101), ("t0-a", 0)):
        await bench.scripts.stop(Keys(0), task_id=task_id, caller=ANN, result_ttl_s=10)
        assert await bench.tokens_used() == left
    admitted = await bench.admit(
        requests_per_min=9, tokens_per_min=1000, prompts=[1, 2, 3], max_tokens=100
    )
    assert isinstance(admitted, Admitted)
    assert admitted.standing.requests is not None
    assert admitted.standing.requests.used == 2  # the first, and it
    await bench.store.give_back(ANN, admitted)
    assert await bench.tokens_used() == 0


async def test_what_was_stopped_while_it_waited_used_nothing(bench: Bench) -> None:
    admitted = await bench.admit(tokens_per_min=1000, max_tokens=500)
    assert isinstance(admitted, Admitted)
    await bench.scripts.submit(
        Keys(1), task_id="t1-a", model="m", caller=ANN, request=b"{}", max_queue=9, live_ttl_s=99,
        reserved=admitted.reserved, admitted_ms=admitted.at_ms,
    )  # fmt: skip
    assert (await bench.scripts.task_fields(Keys(1), "t1-a"))["created"] == str(admitted.at_ms)
    await bench.scripts.stop(Keys(1), task_id="t1-a", caller=ANN, result_ttl_s=10)
    assert await bench.tokens_used() == 0


async def test_an_answer_longer_than_its_minute_counts_its_excess_later(bench: Bench) -> None:
    short = {"tokens_per_min": 1000, "max_tokens": 10, "window_s": 0.1}
    admitted = await bench.admit(**short)
    assert isinstance(admitted, Admitted)
    await asyncio.sleep(0.15)
    await bench.end(admitted, 1, tokens=43)
    answer = await bench.admit(**short)
    assert isinstance(answer, Admitted)
    assert answer.standing.tokens is not None
    assert answer.standing.tokens.used == 10 + (7 + 43 - 10)


async def test_answers_of_unsaid_length_are_taken_to_be_as_before(bench: Bench) -> None:
    limits = {"tokens_per_min": 100_000, "prompts": [7]}
    first = await bench.admit(**limits)
    assert isinstance(first, Admitted)
    assert first.reserved[0].endswith(":263")  # 7 and 256
    await bench.end(first, 0, tokens=16)
    second = await bench.admit(**limits)
    assert isinstance(second, Admitted)
    assert second.reserved[0].endswith(f":{7 + 232}")  # 0.9 * 256 + 0.1 * 16
    # One that could be too long for the limit has the whole minute to itself.
    lone = await bench.admit(tokens_per_min=100, prompts=[7], request_id="lone")
    assert isinstance(lone, Exceeded)


async def test_streams_count_while_somebody_says_so(bench: Bench) -> None:
    assert await bench.store.open_stream(ANN, "a", most=2)
    assert await bench.store.open_stream(ANN, "b", most=2)
    assert await bench.store.open_stream(ANN, "b", most=2)  # its answer had been lost
    assert not await bench.store.open_stream(ANN, "c", most=2)
    await bench.store.close_stream(ANN, "a")
    assert await bench.store.open_stream(ANN, "c", most=2)
    deadline = time.monotonic() + 10
    while not await bench.store.open_stream(ANN, "d", most=1):  # the pods of b and c are dead
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    for _ in range(10):
        await bench.store.keep_streams(ANN, ["d"])
        assert not await bench.store.open_stream(ANN, "e", most=1)
        await asyncio.sleep(0.05)
