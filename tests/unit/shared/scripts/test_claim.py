"""Who gets a task, how many, and what a lost answer costs."""

from importlib.resources import files
from typing import Any

import msgspec
import pytest
from redis.exceptions import ResponseError
from tests.support.script_bench import CALLED, LEASE_S, SHARD, Bench, row
from tests.support.tombs import tombs_of

from millstream.shared.keys import Keys
from millstream.shared.states import Priority
from millstream.shared.steps import (
    ENDED,
    MISSING,
)


@pytest.mark.parametrize("state", ["queued", "running"])
async def test_a_deleted_queue_entry_is_put_back_by_who_looks(bench: Bench, state: str) -> None:
    task_id = await bench.task()
    if state == "running":
        await bench.claim("dead")
    await bench.client.delete(SHARD.queue("m"))  # the entry, its group and its pending list
    assert await bench.log(task_id) == []  # a reader
    assert await bench.queue_length() == 1
    claims = await bench.claim("w")
    if state == "running":  # delivered, and its owner has a lease to renew it in
        assert claims == []
        await bench.lapse()
        claims = await bench.claim("w")
    (claim,) = claims
    assert (claim.task_id, claim.attempt) == (task_id, 1 + (state == "running"))
    assert await bench.log(task_id) == []
    assert await bench.queue_length() == 1
    assert await bench.append(row(claim, 1, "a", outcome="completed", detail="stop")) == [2]
    assert await bench.queue_length() == 0


async def test_a_deleted_queue_entry_is_put_back_by_its_worker(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w")
    ((entry, _),) = await bench.client.xrange(SHARD.queue("m"))
    assert await bench.client.xdel(SHARD.queue("m"), entry) == 1
    assert await bench.renew("w", claim) == 1
    ((new, _),) = await bench.client.xrange(SHARD.queue("m"))
    assert new != entry
    assert await bench.claim("other") == []  # delivered to it, but not its own
    await bench.lapse()
    assert await bench.renew("w", claim) == 1
    assert await bench.claim("other") == []
    assert await bench.append(row(claim, 1, "a", outcome="completed", detail="stop")) == [2]
    assert await bench.queue_length() == 0
    assert (await bench.client.xpending(SHARD.queue("m"), "workers"))["pending"] == 0


async def test_a_worker_runs_one_suspect_at_a_time(bench: Bench) -> None:
    tasks = {await bench.task() for _ in range(3)}
    for worker in ("w1", "w2"):
        claims = await bench.claim(worker)
        assert [claim.suspect for claim in claims] == [False] * 3
        await bench.lapse()
    (first,) = await bench.claim("w3")
    assert first.suspect
    assert await bench.claim("w3", suspects=1) == []
    (second,) = await bench.claim("w4")
    # The poison takes w3 down and ends itself alone; the others go on, one after another.
    assert await bench.append(row(second, 1, "a")) == [1]
    await bench.lapse()
    claims = await bench.claim("w5", sweep=True)
    assert {claim.task_id for claim in claims} == tasks - {first.task_id}
    assert sorted(claim.suspect for claim in claims) == [False, True]
    assert await bench.state(first.task_id) == "failed"


@pytest.mark.parametrize("key", ["task", "log"])
async def test_a_task_with_an_overwritten_key_fails_alone(bench: Bench, key: str) -> None:
    """Its error failed the call for all tasks of the worker, for ever."""

    async def overwrite(task_id: str) -> None:
        await bench.client.delete(getattr(SHARD, key)(task_id))
        await bench.client.set(getattr(SHARD, key)(task_id), "x", ex=60)

    ids = [await bench.task() for _ in range(3)]
    first, second, third = await bench.claim("w")
    await bench.append(row(first, 1, "a"), row(second, 1, "a"), row(third, 1, "a"))
    await overwrite(first.task_id)
    assert await bench.append(row(first, 2, "b"), row(second, 2, "b")) == [MISSING, 2]
    await overwrite(second.task_id)
    assert [await bench.renew("w", claim) for claim in (second, third)] == [ENDED, 1]
    waiting = await bench.task()
    await overwrite(waiting)
    await bench.lapse()
    assert [claim.task_id for claim in await bench.claim("other")] == [third.task_id]
    await overwrite(third.task_id)
    for task_id in (*ids, waiting):
        follow = bench.scripts.follow(
            SHARD, task_id=task_id, caller="ann", pod="p", after=0, count=9
        )
        assert await follow == "unknown"
        assert not await bench.client.exists(SHARD.task(task_id), SHARD.log(task_id))


@pytest.mark.parametrize("key", ["task", "log"])
async def test_nothing_is_written_to_a_task_with_an_overwritten_key(bench: Bench, key: str) -> None:
    for _ in range(4):
        await bench.task()
    claims = await bench.claim("w")
    await bench.append(*(row(claim, 1, "a") for claim in claims))
    for claim in claims:
        await bench.client.set(getattr(SHARD, key)(claim.task_id), "x")
    again, more, end, ahead = claims
    rows = [
        row(again, 1, "a"),
        row(more, 2, "b"),
        row(end, 2, outcome="completed", detail="stop"),
        msgspec.structs.replace(row(ahead, 2, "b"), attempt=2),  # whose claim Redis has lost
    ]
    assert await bench.append(*rows) == [MISSING] * 4
    for claim in claims:
        names = SHARD.task(claim.task_id), SHARD.log(claim.task_id)
        assert not await bench.client.exists(*names)


async def test_what_is_no_fault_of_a_task_fails_the_call_by_its_name(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w")
    await bench.client.delete(SHARD.queue("m"))
    await bench.client.set(SHARD.queue("m"), "x")
    with pytest.raises(ResponseError, match=r"^WRONGTYPE"):
        await bench.append(row(claim, 1, "a", outcome="completed", detail="stop"))
    assert await bench.client.exists(SHARD.task(claim.task_id))


async def test_a_lost_answer_to_a_claim_is_recovered_under_its_attempt(bench: Bench) -> None:
    await bench.task()
    (lost,) = await bench.claim("w1")
    assert await bench.claim("w1", lease_s=60) == []
    assert await bench.claim("w1", lease_s=60, recover=True) == [lost]
    assert await bench.claim("w2", lease_s=60, recover=True) == []


async def test_a_group_made_anew_neither_loses_nor_repeats(bench: Bench) -> None:
    await bench.task()
    (running,) = await bench.claim("w1")
    waiting = await bench.task()
    await bench.client.xgroup_destroy(SHARD.queue("m"), "workers")
    (claim,) = await bench.claim("w2")
    assert claim.task_id == waiting
    assert await bench.renew("w1", running) == 1
    assert await bench.append(row(running, 1, "a", outcome="completed", detail="stop")) == [2]
    assert await bench.queue_length() == 1


async def test_a_missing_group_is_made_by_who_claims(bench: Bench) -> None:
    """Also by one that does not sweep."""
    task_id = await bench.task()
    await bench.client.xgroup_destroy(SHARD.queue("m"), "workers")
    (claim,) = await bench.claim("w1", sweep=False, lease_s=60)
    assert claim.task_id == task_id
    assert (await bench.client.xpending(SHARD.queue("m"), "workers"))["pending"] == 1
    assert await bench.claim("w2", lease_s=60) == []
    assert await bench.append(row(claim, 1, "a", outcome="completed", detail="stop")) == [2]


async def test_a_sweep_keeps_alive_what_workers_need(bench: Bench) -> None:
    await bench.task()
    await bench.claim("w1", sweep=False)
    names = SHARD.idle("m"), SHARD.queue("m")
    lives = [await bench.client.ttl(name) for name in names]
    for name in names:
        await bench.client.expire(name, 60)
    await bench.claim("w1", sweep=False)
    assert [await bench.client.ttl(name) for name in names] == [60, 60]
    await bench.claim("w1")
    assert [await bench.client.ttl(name) for name in names] == lives == [3600, 7 * 86400]


async def test_entries_of_tasks_that_expired_are_cleared(bench: Bench) -> None:
    task_id = await bench.task()
    await bench.client.delete(SHARD.task(task_id))
    assert await bench.claim("w1") == []
    assert await bench.claim("w1") == []  # the next sweep: an entry for which nobody stands in line
    assert await bench.queue_length() == 0


async def test_a_rung_worker_takes_its_share_and_rings_the_next(bench: Bench, pubsub: Any) -> None:
    await pubsub.ssubscribe(SHARD.control("w1"), SHARD.control("w2"))
    await bench.claim("w1")
    await bench.claim("w2")
    for _ in range(6):
        await bench.task()
    claims, waiting = await bench.claim_and_waiting("w1", rung=True)
    assert (len(claims), waiting) == (3, 3)
    claims, waiting = await bench.claim_and_waiting("w2", rung=True)
    assert (len(claims), waiting) == (3, 0)
    heard: list[bytes] = []
    while len(heard) < 2:
        message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=5)
        if message is not None:
            heard.append(message["channel"])
    assert {channel.decode() for channel in heard} == {SHARD.control("w1"), SHARD.control("w2")}
    await pubsub.aclose()


@pytest.mark.parametrize("word", ["new", "released"])
async def test_a_full_worker_that_is_rung_steps_out_and_rings_the_next(
    bench: Bench, pubsub: Any, word: str
) -> None:
    """It has taken tasks of other shards, where this one does not see them."""
    await pubsub.ssubscribe(SHARD.control("w1"), SHARD.control("w2"))
    await bench.claim("w1")
    await bench.claim("w2", running=5)
    await bench.task()
    if word == "released":
        (task,) = await bench.claim("w3", free=1)
        await bench.claim("w1")
        given = [(task.task_id, task.attempt)]
        await bench.scripts.release(
            SHARD, worker="w3", model="m", lease_s=LEASE_S, blame="", tasks=given
        )
    answer = await bench.claim_and_waiting(
        "w1", free=0, running=10, rung=True, sweep=word == "released"
    )
    assert answer == ([], 1 if word == "new" else 0)
    assert await bench.idle() == {b"w2": CALLED + 5}
    heard: list[tuple[str, str]] = []
    while len(heard) < (2 if word == "new" else 3):
        message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=5)
        if message is not None:
            heard.append((message["channel"].decode(), message["data"].decode()))
    assert heard[-2:] == [(SHARD.control("w1"), word), (SHARD.control("w2"), word)]
    await pubsub.aclose()


@pytest.mark.parametrize("end", ["append", "stop"])
async def test_whose_tasks_have_ended_is_rung_again(bench: Bench, pubsub: Any, end: str) -> None:
    """It need not claim for that: two workers, short tasks on one and a long one on the other."""
    await pubsub.ssubscribe(SHARD.control("w1"), SHARD.control("w2"))
    for _ in range(3):
        await bench.task()
    short = await bench.claim("w1", free=2)
    await bench.claim("w2")
    await bench.claim("w1", running=2)
    assert await bench.idle() == {b"w1": 2, b"w2": 1}
    for claim in short:
        if end == "append":
            await bench.append(row(claim, 1, "a", outcome="completed", detail="stop"))
        else:
            await bench.stop(claim.task_id)
    assert await bench.idle() == {b"w1": 0, b"w2": 1}
    await bench.task()
    assert await bench.idle() == {b"w1": CALLED, b"w2": 1}


async def test_a_load_is_never_below_nothing(bench: Bench, pubsub: Any) -> None:
    """A number that was too low already, and a worker that is not in the idle set."""
    await pubsub.ssubscribe(SHARD.control("w1"))
    for _ in range(2):
        await bench.task()
    first, second = await bench.claim("w1")
    await bench.client.zadd(SHARD.idle("m"), {"w1": 0})
    await bench.stop(first.task_id)
    assert await bench.idle() == {b"w1": 0}
    await bench.task()
    assert await bench.idle() == {b"w1": CALLED}
    await bench.stop(second.task_id)
    assert await bench.idle() == {b"w1": CALLED}
    (full,) = await bench.claim("w1", free=1)
    await bench.stop(full.task_id)
    assert await bench.idle() == {}


async def test_a_worker_that_merely_looks_takes_all(bench: Bench) -> None:
    await bench.claim("frozen")
    for _ in range(6):
        await bench.task()
    assert len(await bench.claim("w1")) == 6


async def test_never_more_than_free_slots(bench: Bench) -> None:
    for _ in range(5):
        await bench.task()
    first = await bench.claim("w1", free=2)
    await bench.lapse()
    assert len(first) == 2
    assert len(await bench.claim("w2", free=3)) == 3


async def test_scripts_survive_a_script_flush(bench: Bench) -> None:
    await bench.task()
    await bench.client.script_flush()
    (claim,) = await bench.claim("w1")
    await bench.client.script_flush()
    assert await bench.append(row(claim, 1, "a")) == [1]


async def test_a_claim_tells_how_the_task_came(bench: Bench) -> None:
    await bench.task(priority=Priority.BATCH)
    (claim,) = await bench.claim("w1")
    assert (claim.priority, claim.handed_over) == (Priority.BATCH, False)
    await bench.scripts.release(
        SHARD, worker="w1", model="m", lease_s=LEASE_S, blame="", tasks=[(claim.task_id, 1)]
    )
    (again,) = await bench.claim("w2")
    assert (again.attempt, again.priority, again.handed_over) == (2, Priority.BATCH, True)
    await bench.lapse()
    (third,) = await bench.claim("w3")
    assert (third.attempt, third.handed_over) == (3, False)
    assert [each.predecessor for each in (claim, again, third)] == ["", "", "w2"]


async def test_names_are_spelled_as_in_python() -> None:
    """lib.lua builds the names of keys it learns of inside a script."""
    text = (files("millstream.shared") / "lua" / "lib.lua").read_text("utf-8")
    shard = Keys(7)
    for name in (
        shard.task(""), shard.log(""), shard.tomb(""), shard.queue(""), shard.idle(""),
        shard.rate(""), shard.dead(""), shard.pod(""), shard.control(""), shard.line(""),
        shard.fair(""), shard.due(),
    ):  # fmt: skip
        assert f"tag .. '{name.removeprefix(shard.tag)}'" in text
    assert "tag .. ':tombs:' .. int(span) .. ':' .. head" in text
    for name in (shard.turns("x", "y"), shard.spent("x", "y")):
        head = name.removeprefix(shard.tag).removesuffix("x:y")
        assert f"tag .. '{head}' .. level .. ':' .. model" in text


async def test_a_list_of_idle_workers_of_another_type_leaves_nothing_half_done(
    bench: Bench,
) -> None:
    """Somebody's hand was in it: no worker is given what it is not told of, and what ends, ends."""
    await bench.task()
    (running,) = await bench.claim("w1", free=1)
    waiting = await bench.task()
    await bench.client.delete(SHARD.idle("m"))
    await bench.client.set(SHARD.idle("m"), "x", ex=60)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await bench.claim("w2")
    assert await bench.state(waiting) == "queued"
    assert await bench.append(row(running, 1, "a", outcome="completed", detail="stop")) == [2]
    assert await bench.client.ttl(SHARD.task(running.task_id)) <= 10
    assert await tombs_of(bench.client, running.task_id)
    await bench.client.delete(SHARD.idle("m"))
    assert [claim.task_id for claim in await bench.claim("w2")] == [waiting]
