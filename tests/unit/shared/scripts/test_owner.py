"""What the owner of a task may do, and nobody else."""

from typing import Any

from tests.support.script_bench import LEASE_S, SHARD, Bench, row

from millstream.shared.steps import (
    ENDED,
    MISSING,
    STALE,
)


async def test_append_sent_twice_changes_nothing(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1")
    assert await bench.append(row(claim, 1, "a", "b")) == [2]
    assert await bench.append(row(claim, 1, "a", "b")) == [2]
    assert await bench.append(row(claim, 1, "a", "x", "c")) == [STALE]  # not what the log has
    assert await bench.append(row(claim, 1, "a", "b", "c")) == [3]
    assert [event.text for event in await bench.log(claim.task_id)] == ["a", "b", "c"]
    end = row(claim, 4, outcome="completed", detail="length")
    assert await bench.append(end) == [4]
    assert await bench.append(end) == [ENDED]
    assert len(await bench.log(claim.task_id)) == 4


async def test_append_never_leaves_a_gap(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1")
    await bench.append(row(claim, 1, "a"))
    assert await bench.append(row(claim, 3, "c", outcome="completed", detail="stop")) == [1]
    assert await bench.state(claim.task_id) == "running"
    assert len(await bench.log(claim.task_id)) == 1


async def test_a_late_owner_can_do_nothing(bench: Bench) -> None:
    await bench.task()
    (old,) = await bench.claim("w1")
    await bench.append(row(old, 1, "a"))
    await bench.lapse()
    (new,) = await bench.claim("w2")
    assert (new.attempt, [event.text for event in new.log]) == (2, ["a"])
    # I4: neither append nor end nor renewal nor release of the old attempt gets through.
    assert await bench.append(row(old, 2, "z")) == [STALE]
    assert await bench.append(row(old, 2, outcome="completed", detail="stop")) == [STALE]
    assert await bench.renew("w1", old) == STALE
    gave = await bench.scripts.release(
        SHARD, worker="w1", model="m", lease_s=LEASE_S, blame="",
        tasks=[(old.task_id, old.attempt)],
    )  # fmt: skip
    assert gave == 0
    (pending,) = await bench.client.xpending_range(SHARD.queue("m"), "workers", "-", "+", 10)
    assert pending["consumer"] == b"w2"
    assert await bench.append(row(new, 2, "b", outcome="completed", detail="stop")) == [3]
    assert [event.ids for event in await bench.log(new.task_id)] == ["101", "102", ""]


async def test_renewal_keeps_a_lease(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1")
    await bench.lapse()
    assert await bench.renew("w1", claim) == 1
    assert await bench.claim("w2") == []


async def test_a_released_task_moves_on_at_once_and_without_blame(bench: Bench) -> None:
    await bench.task()
    for attempt in range(1, 8):  # more than max_attempts
        (claim,) = await bench.claim(f"w{attempt}", lease_s=60)
        assert claim.attempt == attempt
        gave = await bench.scripts.release(
            SHARD, worker=f"w{attempt}", model="m", lease_s=60, blame="",
            tasks=[(claim.task_id, claim.attempt)],
        )  # fmt: skip
        assert gave == 1


async def test_losses_without_progress_end_a_task(bench: Bench) -> None:
    task_id = await bench.task(request=b'{"x": 1}')
    for attempt in (1, 2, 3):
        (claim,) = await bench.claim(f"w{attempt}")
        assert claim.attempt == attempt
        await bench.lapse()
    assert await bench.claim("w4") == []
    (last,) = await bench.log(task_id)
    assert (last.seq, last.kind) == (1, "failed")
    assert last.body["error"]["code"] == "max_attempts"
    ((_, dead),) = await bench.client.xrange(SHARD.dead("m"))
    assert (dead[b"task"].decode(), dead[b"request"]) == (task_id, b'{"x": 1}')
    assert await bench.queue_length() == 0


async def test_progress_clears_the_blame(bench: Bench) -> None:
    await bench.task()
    for attempt in range(1, 8):
        (claim,) = await bench.claim(f"w{attempt}")
        assert claim.attempt == attempt
        assert await bench.append(row(claim, attempt, "x")) == [attempt]
        await bench.lapse()


async def test_the_reason_of_a_blamed_release_is_told(bench: Bench) -> None:
    task_id = await bench.task()
    for attempt in (1, 2, 3):
        (claim,) = await bench.claim("w", lease_s=60)
        await bench.scripts.release(
            SHARD, worker="w", model="m", lease_s=60, blame='out of "memory"\n',
            tasks=[(claim.task_id, attempt)],
        )  # fmt: skip
    assert await bench.claim("w", lease_s=60) == []
    (last,) = await bench.log(task_id)
    assert last.body["error"]["message"].endswith('out of "memory"\n')


async def test_append_to_a_task_that_is_gone(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1")
    await bench.client.delete(SHARD.task(claim.task_id))
    assert await bench.append(row(claim, 1, "a")) == [MISSING]
    assert await bench.client.exists(SHARD.log(claim.task_id)) == 0


async def test_a_task_has_a_deadline_whoever_sees_that_it_has_passed(bench: Bench) -> None:
    renewed = await bench.task()
    (claim,) = await bench.claim("w1")
    await bench.pass_deadline(renewed)
    assert await bench.renew("w1", claim) == ENDED

    looked_for = [await bench.task(), await bench.task()]
    for task_id in looked_for:
        await bench.pass_deadline(task_id)
    later = await bench.task(life_s=50)
    left = await bench.scripts.end_due(SHARD, result_ttl_s=10)
    assert left is not None
    assert 40 < left <= 50

    claimed = await bench.task()
    await bench.pass_deadline(claimed)
    assert [claim.task_id for claim in await bench.claim("w1", sweep=False)] == [later]
    for task_id in (renewed, *looked_for, claimed):
        (last,) = await bench.log(task_id)
        assert last.body["error"]["code"] == "deadline_exceeded"
        assert last.body["error"]["message"] == "The task had not ended after 2.5 s."
    assert await bench.queue_length() == 1
    await bench.stop(later)
    assert await bench.scripts.end_due(SHARD, result_ttl_s=10) is None


async def test_a_deadline_tells_its_worker(bench: Bench, pubsub: Any) -> None:
    await pubsub.ssubscribe(SHARD.control("w1"))
    await bench.task()
    (claim,) = await bench.claim("w1")
    await bench.pass_deadline(claim.task_id)
    await bench.scripts.end_due(SHARD, result_ttl_s=10)
    while (message := await pubsub.get_message(ignore_subscribe_messages=True, timeout=5)) is None:
        pass
    assert message["data"].decode() == f"stop {claim.task_id} 1"
    assert await bench.append(row(claim, 1, "a")) == [ENDED]
    await pubsub.aclose()
