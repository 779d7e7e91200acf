"""What Redis lost and somebody remembers."""

from tests.support.script_bench import SHARD, Bench, row

from millstream.shared.events import Event
from millstream.shared.schemas import new_task_id
from millstream.shared.steps import (
    STALE,
)


def told(first: int, *texts: str) -> list[Event]:
    return [
        Event(first + n, "t", str(100 + first + n), f'"{text}"') for n, text in enumerate(texts)
    ]


async def test_a_claim_that_was_lost_is_taken_back_with_all_that_was_written(bench: Bench) -> None:
    task_id = await bench.task()
    before = await bench.memory()
    (claim,) = await bench.claim("w1")
    assert await bench.append(row(claim, 1, "a", "b")) == [2]
    await bench.go_back(before)
    assert (await bench.state(task_id), await bench.log(task_id)) == ("queued", [])
    assert await bench.renew("w1", claim) == 1  # it is not told to drop it
    assert await bench.append(row(claim, 3, "c")) == [0]
    assert await bench.state(task_id) == "running"
    assert await bench.append(row(claim, 1, "a", "b", "c")) == [3]
    assert await bench.claim("w2") == []  # its entry is delivered, and not another's
    assert await bench.log(task_id) == told(1, "a", "b", "c")
    assert await bench.append(row(claim, 4, outcome="completed", detail="stop")) == [4]
    assert await bench.queue_length() == 0


async def test_who_claimed_after_the_loss_keeps_the_task(bench: Bench) -> None:
    """Attempt 1 was given twice: once before the loss, once after it."""
    task_id = await bench.task()
    before = await bench.memory()
    (old,) = await bench.claim("w1")
    assert await bench.append(row(old, 1, "a", "b")) == [2]
    await bench.go_back(before)
    (new,) = await bench.claim("w2")
    assert (new.attempt, new.log) == (old.attempt, [])
    assert await bench.append(row(new, 1, "x")) == [1]
    bench.workers[task_id, 1] = "w1"
    assert await bench.append(row(old, 3, "c")) == [STALE]
    assert await bench.renew("w1", old) == STALE
    assert await bench.log(task_id) == told(1, "x")


async def test_a_task_that_is_taken_back_has_a_deadline(bench: Bench) -> None:
    """One of an older pod has none until it is claimed, and Redis may lose that claim."""
    task_id = await bench.task()
    await bench.client.hdel(SHARD.task(task_id), "deadline")
    await bench.client.delete(SHARD.due())
    before = await bench.memory()
    (claim,) = await bench.claim("w1")
    assert "deadline" in await bench.scripts.task_fields(SHARD, task_id)
    await bench.go_back(before)
    await bench.client.expire(SHARD.task(task_id), 50)
    assert await bench.append(row(claim, 1, "a")) == [0]
    left = await bench.scripts.end_due(SHARD, result_ttl_s=10)
    assert left is not None
    assert 40 < left <= 50


async def test_a_worker_ahead_does_not_write_behind_another_text(bench: Bench) -> None:
    task_id = await bench.task()
    before = await bench.memory()
    await bench.claim("w1")
    await bench.lapse()
    (ahead,) = await bench.claim("w1")
    assert ahead.attempt == 2
    assert await bench.append(row(ahead, 1, "a", "b")) == [2]
    await bench.go_back(before)
    (other,) = await bench.claim("w2")
    assert await bench.append(row(other, 1, "x", "b")) == [2]
    assert await bench.append(row(ahead, 3, "c")) == [0]
    assert await bench.append(row(ahead, 1, "a", "b", "c")) == [STALE]
    assert await bench.log(task_id) == told(1, "x", "b")


async def test_what_was_shown_is_put_back_before_the_task_goes_on(bench: Bench) -> None:
    task_id = await bench.task()
    (claim,) = await bench.claim("w1")
    assert await bench.append(row(claim, 1, "a")) == [1]
    before = await bench.memory()
    assert await bench.append(row(claim, 2, "b", "c")) == [3]
    await bench.go_back(before)
    assert await bench.restore(task_id, *told(3, "c")) == "short"
    assert await bench.restore(task_id, *told(1, "a", "b", "c")) == "whole"
    assert await bench.restore(task_id, *told(2, "b", "c")) == "whole"  # twice
    assert await bench.log(task_id) == told(1, "a", "b", "c")
    await bench.lapse()
    (next_claim,) = await bench.claim("w2")
    assert next_claim.log == told(1, "a", "b", "c")
    assert await bench.append(row(next_claim, 4, outcome="completed", detail="stop")) == [4]
    (end,) = await bench.log(task_id, after=3)
    assert end.body["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


async def test_an_end_that_was_shown_is_put_back(bench: Bench) -> None:
    task_id = await bench.task()
    before = await bench.memory()
    (claim,) = await bench.claim("w1")
    assert await bench.append(row(claim, 1, "a", outcome="completed", detail="stop")) == [2]
    shown = await bench.log(task_id)
    await bench.go_back(before)
    assert await bench.restore(task_id, *shown) == "whole"
    assert await bench.log(task_id) == shown
    assert await bench.state(task_id) == "completed"
    assert (await bench.scripts.task_fields(SHARD, task_id))["finish_reason"] == "stop"
    assert await bench.queue_length() == 0
    assert await bench.claim("w2") == []


async def test_a_text_that_came_otherwise_is_refused_to_who_saw_the_first(bench: Bench) -> None:
    task_id = await bench.task()
    before = await bench.memory()
    (claim,) = await bench.claim("w1")
    assert await bench.append(row(claim, 1, "a", "b")) == [2]
    await bench.go_back(before)
    (other,) = await bench.claim("w2")
    assert await bench.append(row(other, 1, "a", "x", "y")) == [3]
    assert await bench.restore(task_id, *told(1, "a", "b")) == "other"
    assert await bench.log(task_id) == told(1, "a", "x", "y")
    assert await bench.log(task_id, after=1) == told(2, "x", "y")  # event 1 is the same
    for after in (2, 3):
        refused = await bench.scripts.follow(
            SHARD, task_id=task_id, caller="ann", pod="", after=after, count=10
        )
        assert refused == "rewound"
    assert await bench.restore(new_task_id(0), *told(1, "a")) == "unknown"


async def test_a_worker_that_took_over_before_it_was_put_back_makes_way(bench: Bench) -> None:
    task_id = await bench.task()
    before = await bench.memory()
    (lost,) = await bench.claim("w1")
    assert await bench.append(row(lost, 1, "a", "b")) == [2]
    await bench.go_back(before)
    (claim,) = await bench.claim("w2")  # holds an empty log
    assert await bench.restore(task_id, *told(1, "a", "b")) == "whole"
    assert await bench.append(row(claim, 1, "x", "y", "z")) == [STALE]
    assert await bench.log(task_id) == told(1, "a", "b")
    await bench.lapse()
    (claim,) = await bench.claim("w2")
    assert (claim.attempt, claim.log) == (2, told(1, "a", "b"))
