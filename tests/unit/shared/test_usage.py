"""Usage: each task once, whatever ends it; also what Redis loses and gets back."""

from datetime import UTC, date, datetime, timedelta

import pytest
from tests.support.script_bench import SHARD, Bench, row

from millstream.shared.script_runner import ScriptRunner
from millstream.shared.scripts import Scripts
from millstream.shared.usage import DayOfUsage, read_usage


@pytest.fixture
def bench(scripts: Scripts) -> Bench:
    return Bench(scripts)


async def used(bench: Bench, caller: str | None = "ann") -> list[tuple[int, int, int]]:
    """(tasks, prompt tokens, completion tokens) of each caller, also if a day begins meanwhile."""
    today = datetime.now(UTC).date()
    rows = await read_usage(
        bench.scripts.runner, shards=1, first=today - timedelta(1), last=today, caller=caller
    )
    sums: dict[str, tuple[int, int, int]] = {}
    for each in rows:
        assert each.model == "m"
        tasks, prompt, completion = sums.get(each.caller, (0, 0, 0))
        sums[each.caller] = (
            tasks + each.tasks,
            prompt + each.prompt_tokens,
            completion + each.completion_tokens,
        )
    return [sums[caller] for caller in sorted(sums)]


async def test_each_end_counts_once(bench: Bench) -> None:
    assert await used(bench) == []
    await bench.task()
    (claim,) = await bench.claim("w")
    end = row(claim, 1, "a", "b", outcome="completed", detail="stop")
    await bench.append(end)
    await bench.append(end)
    await bench.stop(claim.task_id)
    assert await used(bench) == [(1, 5, 2)]

    await bench.stop(await bench.task())  # while it waited
    assert await used(bench) == [(2, 5, 2)]

    await bench.task()
    (claim,) = await bench.claim("w")
    await bench.append(row(claim, 1, "a", "b", "c"))
    for _ in range(2):
        await bench.stop(claim.task_id)
    assert await used(bench) == [(3, 10, 5)]


async def test_a_withdrawn_task_does_not_count(bench: Bench) -> None:
    """Its caller was told 503, and sends the request again."""
    for ended in (False, True):
        await bench.task()
        (claim,) = await bench.claim("w")
        end = {"outcome": "completed", "detail": "stop"} if ended else {}
        await bench.append(row(claim, 1, "a", "b", **end))
        for _ in range(2):
            await bench.scripts.delete(
                SHARD, task_id=claim.task_id, caller="ann", result_ttl_s=10, withdraw=True
            )
        assert await used(bench) == [(0, 0, 0)]

    await bench.task()
    (claim,) = await bench.claim("w")
    await bench.append(row(claim, 1, "a", outcome="completed", detail="stop"))
    await bench.scripts.delete(SHARD, task_id=claim.task_id, caller="ann", result_ttl_s=10)
    assert await used(bench) == [(1, 5, 1)]  # who deletes an answer has had it


async def test_a_task_that_moved_counts_once_and_one_given_up_what_it_made(bench: Bench) -> None:
    await bench.task()
    for attempt in (1, 2, 3):
        (claim,) = await bench.claim(f"w{attempt}")
        await bench.append(row(claim, 1, *(claim.log and [event.text for event in claim.log]), "a"))
        await bench.lapse()
    for attempt in (4, 5, 6):
        await bench.claim(f"w{attempt}")
        await bench.lapse()
    assert await bench.queue_length() == 0
    assert await used(bench) == [(1, 5, 3)]


async def test_callers_and_models_are_apart(bench: Bench) -> None:
    for caller in ("ann", "bob", "bob"):
        await bench.stop(await bench.task(caller=caller), caller)
    assert await used(bench, "ann") == [(1, 0, 0)]
    assert await used(bench, "bob") == [(2, 0, 0)]
    assert await used(bench, None) == [(1, 0, 0), (2, 0, 0)]
    assert await used(bench, "eve") == []


async def test_what_is_lost_and_put_back_counts_once(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w")
    before = await bench.memory()
    await bench.append(row(claim, 1, "a", "b", outcome="completed", detail="stop"))
    told = await bench.log(claim.task_id)
    await bench.go_back(before)
    assert await used(bench) == []
    for _ in range(2):
        assert await bench.restore(claim.task_id, *told) == "whole"
    assert await used(bench) == [(1, 5, 2)]


async def test_the_days_and_shards_are_read_in_order(bench: Bench) -> None:
    runner: ScriptRunner = bench.scripts.runner
    days = {date(2026, 2, 28): 20_512, date(2026, 3, 1): 20_513}
    for day, number in days.items():
        key = SHARD.usage("ann", number)
        counts = {"tasks a b": day.day, "prompt_tokens a b": 2, "completion_tokens a b": 3}
        await runner.client.hset(key, mapping=counts)
    rows = await read_usage(
        runner, shards=3, first=min(days) - timedelta(9), last=max(days), caller="ann"
    )
    assert rows == [DayOfUsage(day, "ann", "a b", day.day, 2, 3) for day in days]
