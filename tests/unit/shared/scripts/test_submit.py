"""The way in: places, times told to who is refused, and what may repeat."""

import asyncio
import os
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError
from tests.support.script_bench import SHARD, Bench, row

from millstream.shared.queue_depth import ClassDepth, QueueDepth
from millstream.shared.schemas import new_task_id
from millstream.shared.states import Priority
from millstream.shared.steps import (
    MISSING,
    Refused,
    Submitted,
)


async def test_a_task_from_submit_to_end(bench: Bench) -> None:
    task_id = await bench.task()
    assert await bench.state(task_id) == "queued"
    (claim,) = await bench.claim("w1")
    assert (claim.task_id, claim.attempt, claim.request, claim.log) == (task_id, 1, b"{}", [])
    assert await bench.state(task_id) == "running"
    assert await bench.append(row(claim, 1, "a", "b")) == [2]
    assert await bench.append(row(claim, 3, "c", outcome="completed", detail="stop")) == [4]
    log = await bench.log(task_id)
    assert [event.seq for event in log] == [1, 2, 3, 4]
    assert [event.text for event in log[:3]] == ["a", "b", "c"]
    assert log[3].body == {
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
    }
    assert await bench.queue_length() == 0
    assert (await bench.client.xpending(SHARD.queue("m"), "workers"))["pending"] == 0
    assert 0 < await bench.client.ttl(SHARD.task(task_id)) <= 10
    assert 0 < await bench.client.ttl(SHARD.log(task_id)) <= 10


async def test_submit_sent_twice_makes_one_task(bench: Bench) -> None:
    task_id = new_task_id(0)
    assert isinstance(await bench.submit(task_id=task_id), Submitted)
    assert isinstance(await bench.submit(task_id=task_id), Submitted)
    assert await bench.queue_length() == 1
    (claim,) = await bench.claim("w1")
    assert await bench.append(row(claim, 1, "a", outcome="completed", detail="stop")) == [2]
    late = await bench.submit(task_id=task_id)  # its first answer was lost for as long as it ran
    assert isinstance(late, Submitted)
    assert late.position == 0
    assert [event.seq for event in await bench.log(task_id)] == [1, 2]
    assert await bench.queue_length() == 0


async def test_the_queue_bound_counts_the_waiting_alone(bench: Bench) -> None:
    for _ in range(3):
        await bench.task(max_queue=3)
    refused = await bench.submit(max_queue=3)
    assert refused == Refused(conflict=False, retry_after_s=1.25)
    assert len([key async for key in bench.client.scan_iter("*:task:*")]) == 3
    await bench.claim("w1", free=2)
    for _ in range(2):
        await bench.task(max_queue=3)
    assert isinstance(await bench.submit(max_queue=3), Refused)


async def refused_for(bench: Bench, **changes: Any) -> float:
    """What somebody who is refused is told, in seconds."""
    refused = await bench.submit(max_queue=1, **changes)
    assert isinstance(refused, Refused)
    return refused.retry_after_s


async def test_who_is_refused_is_told_a_time_of_its_own(bench: Bench) -> None:
    await bench.task()
    assert [await refused_for(bench) for _ in range(5)] == [1.25, 2.5, 3.75, 5.0, 6.25]
    await refused_for(bench, promise=False)  # takes none
    await bench.claim("w1", free=1)
    await bench.task(max_queue=1)  # one of those who were told
    assert await refused_for(bench) == 6.5
    for _ in range(42):
        told = await refused_for(bench)
    assert told == 59
    assert await refused_for(bench) == 1.25  # nobody waits for ever at a guess


async def test_times_follow_each_other_as_places_come_free(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1", free=1)
    await bench.append(row(claim, 1, outcome="completed", detail="stop"))
    running = [await bench.task(max_queue=10) for _ in range(5)]
    assert len(await bench.claim("w1", free=4)) == 4
    await bench.client.hset(SHARD.rate("m"), "service_ms", 1600)  # four run: 0.4 s a place
    assert [await refused_for(bench) for _ in range(3)] == [0.5, 1.0, 1.5]
    ((caller, promise),) = (await bench.client.hgetall(SHARD.refused("m"))).items()
    ticket, _ = promise.split()  # they should have come by now:
    await bench.client.hset(SHARD.refused("m"), caller, ticket + b" 0")
    assert await refused_for(bench) == 0.5
    assert running


async def test_who_hammers_moves_nobodys_time_but_its_own(bench: Bench) -> None:
    await bench.task()
    for _ in range(30):
        told = await refused_for(bench, caller="ann")
    assert told == 30 * 1.25
    assert await refused_for(bench, caller="bob") == 2.5  # every other place is his
    assert [await refused_for(bench, caller=caller) for caller in ("bob", "ann", "bob")] == [
        5.0,
        40.0,
        7.5,
    ]
    # Each caller that comes but once has a place of its own.
    assert [await refused_for(bench, caller=f"c{at}") for at in range(5)] == [
        1.25 * lines for lines in range(3, 8)
    ]


async def test_lines_of_callers_are_bounded(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1", free=1)
    await bench.append(row(claim, 1, outcome="completed", detail="stop"))
    running = [await bench.task(max_queue=10) for _ in range(2)]
    assert len(await bench.claim("w1", free=1)) == 1
    await bench.client.hset(SHARD.rate("m"), "service_ms", 4_000)  # no line lapses meanwhile
    told = [await refused_for(bench, caller=f"c{at}") for at in range(300)]
    assert await bench.client.hlen(SHARD.refused("m")) == 257
    assert told[:12] == [5.0 * lines for lines in range(1, 13)]
    assert 5 <= min(told) <= max(told) <= 60
    assert running
    for caller, promise in (await bench.client.hgetall(SHARD.refused("m"))).items():
        await bench.client.hset(SHARD.refused("m"), caller, promise.split()[0] + b" 0")
    assert await refused_for(bench, caller="new") == 5
    assert await bench.client.hlen(SHARD.refused("m")) == 1


async def test_several_tasks_are_taken_together_or_not_at_all(bench: Bench) -> None:
    ids = [new_task_id(0) for _ in range(3)]
    wanted = {"task_id": ids[0], "request": b"0", "more": [(ids[1], b"1"), (ids[2], b"2")]}
    await bench.task()
    refused = await bench.submit(**wanted, max_queue=3)
    assert refused == Refused(conflict=False, retry_after_s=3 * 1.25)
    assert await bench.queue_length() == 1
    first = await bench.submit(**wanted, max_queue=4)
    assert isinstance(first, Submitted)
    assert first == Submitted(tuple(ids), False, first.created_ms, 2, None)
    assert await bench.submit(**wanted, max_queue=4) == first  # its answer was lost
    assert await bench.queue_length() == 4
    assert [(c.task_id, c.request) for c in (await bench.claim("w1"))[1:]] == [
        (ids[0], b"0"),
        (ids[1], b"1"),
        (ids[2], b"2"),
    ]


async def test_a_key_stands_for_all_tasks_it_made(bench: Bench) -> None:
    def wanted() -> dict[str, Any]:
        more = [(new_task_id(0), b"{}")]
        return {"idempotency_key": "k", "body_hash": "1", "more": more}

    first = await bench.submit(**wanted())
    assert isinstance(first, Submitted)
    assert len(first.task_ids) == 2
    again = await bench.submit(**wanted())
    assert again == Submitted(first.task_ids, True, first.created_ms, 0, 0.0)
    assert await bench.queue_length() == 2


async def test_idempotency_is_per_caller_and_body(bench: Bench) -> None:
    first = await bench.submit(idempotency_key="k", body_hash="1")
    again = await bench.submit(idempotency_key="k", body_hash="1")
    assert isinstance(first, Submitted)
    assert again == Submitted(first.task_ids, True, first.created_ms, 0, 0.0)
    fields = await bench.client.hgetall(SHARD.task(first.task_id))
    assert int(fields[b"created"]) == first.created_ms
    assert await bench.submit(idempotency_key="k", body_hash="2") == Refused(True, 0)
    other = await bench.submit(idempotency_key="k", body_hash="2", caller="bob")
    assert isinstance(other, Submitted)
    assert not other.known
    assert await bench.queue_length() == 2


async def test_who_leaves_ends_only_what_nobody_else_wants(bench: Bench) -> None:
    async def leave(task_id: str, pod: str) -> str:
        stop = bench.scripts.stop(
            SHARD, task_id=task_id, caller="ann", result_ttl_s=10, left_by=pod
        )
        return (await stop)[0]

    async def follow(task_id: str, pod: str) -> None:
        await bench.scripts.follow(SHARD, task_id=task_id, caller="ann", pod=pod, after=0, count=10)

    native, attached = await bench.task(), await bench.task(orphan_s=20)
    assert await leave(native, "p1") == "queued"  # it belongs to no connection
    await follow(attached, "p1")
    await follow(attached, "p2")
    assert await leave(attached, "p1") == "queued"  # p2's reader is still there
    await bench.scripts.unfollow(SHARD, pod="p2", task_ids=[attached])
    assert await leave(attached, "p1") == "cancelled"
    assert await leave(attached, "p1") == "cancelled"
    assert [event.kind for event in await bench.log(attached)] == ["cancelled"]
    assert [claim.task_id for claim in await bench.claim("w1")] == [native]
    assert await leave(native, "p1") == "running"


async def test_a_withdrawn_task_is_not_taken_whenever_its_submit_comes(bench: Bench) -> None:
    ids = [new_task_id(0), new_task_id(0)]
    withdraw = {"caller": "ann", "result_ttl_s": 10, "withdraw": True}
    assert not await bench.scripts.delete(SHARD, task_id=ids[0], **withdraw)
    await bench.task(task_id=ids[1])
    (claim,) = await bench.claim("w")
    assert await bench.scripts.delete(SHARD, task_id=ids[1], **withdraw)
    assert await bench.append(row(claim, 1, "a")) == [MISSING]
    for task_id in ids:
        assert isinstance(await bench.submit(task_id=task_id), Refused)
        assert not await bench.client.exists(SHARD.task(task_id), SHARD.log(task_id))
        assert 10 < await bench.client.ttl(SHARD.tomb(task_id)) <= 10 + 86400
    assert await bench.queue_length() == 0


@pytest.mark.skipif(os.environ.get("TEST_REDIS") == "cluster", reason="limits one server")
async def test_a_full_redis_refuses_the_whole(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1")
    used = (await bench.client.info("memory"))["used_memory"]
    await bench.client.config_set("maxmemory", used)
    try:
        before = sorted([key async for key in bench.client.scan_iter("*")])
        with pytest.raises(OutOfMemoryError):
            await bench.submit(request=b"x" * 100_000)
        with pytest.raises(OutOfMemoryError):
            await bench.append(row(claim, 1, "a"))
        assert sorted([key async for key in bench.client.scan_iter("*")]) == before
        assert await bench.renew("w1", claim) == 1  # leases hold meanwhile
        assert (await bench.stop(claim.task_id))[0] == "cancelled"  # and a stop is a stop
    finally:
        await bench.client.config_set("maxmemory", 0)


async def test_waiting_tells_order_and_wait(bench: Bench) -> None:
    ids = [await bench.task() for _ in range(4)]
    await bench.claim("w1", free=1)
    view = await bench.scripts.waiting(SHARD, model="m", count=10)
    assert (view.running, view.waiting, view.waiting_ids) == (1, 3, ids[1:])
    await bench.stop(ids[2])
    view = await bench.scripts.waiting(SHARD, model="m", count=10)
    assert view.waiting_ids == [ids[1], ids[3]]


async def test_depth_tells_classes_apart_and_finds_the_oldest(bench: Bench) -> None:
    assert await bench.scripts.depth(SHARD, model="m") == QueueDepth(
        0, 0, dict.fromkeys(Priority, ClassDepth())
    )
    first = await bench.task(caller="zoe")
    for caller in ("ann", "bob", "bob"):
        await bench.task(caller=caller)
    await bench.task(caller="ann", priority=Priority.BATCH)
    place = await bench.client.zrange(SHARD.line("m"), 0, -1)
    (since,) = [
        int(member.split(b":")[2].split(b"-")[0]) for member in place if first.encode() in member
    ]
    await asyncio.sleep(0.02)
    now = await bench.client.time()
    depth = await bench.scripts.depth(SHARD, model="m")
    assert (depth.running, depth.waiting) == (0, 5)
    assert {name: each.waiting for name, each in depth.classes.items()} == {
        Priority.INTERACTIVE: 4,
        Priority.BATCH: 1,
    }
    assert depth.oldest_wait_s == depth.classes[Priority.INTERACTIVE].oldest_wait_s
    assert depth.oldest_wait_s >= now[0] + now[1] // 1000 / 1000 - since / 1000 - 0.001
    assert depth.classes[Priority.BATCH].oldest_wait_s <= depth.oldest_wait_s
    (claim,) = await bench.claim("w1", free=1, max_attempts=1)
    await bench.lapse()
    assert await bench.claim("w2", free=0, max_attempts=1) == []
    assert await bench.claim("w2", free=1, max_attempts=1) != []
    depth = await bench.scripts.depth(SHARD, model="m")
    assert (depth.running, depth.dead_letters, depth.waiting) == (1, 1, 3)
    assert (claim.age_s > 0, claim.handed_over) == (True, False)
    two = QueueDepth.of_all([depth, depth])
    assert (two.running, two.dead_letters, two.waiting) == (2, 2, 6)
    assert two.oldest_wait_s == depth.oldest_wait_s


async def test_a_dead_worker_has_no_room(bench: Bench) -> None:
    await bench.claim("w1", free=1)
    async with bench.client.pubsub() as listening:
        await listening.ssubscribe(SHARD.control("w1"))
        assert await listening.get_message(timeout=5) is not None  # of the subscription
        heard = await bench.submit()
        assert isinstance(heard, Submitted)
        assert (heard.position, heard.eta_s) == (1, 0)
        await bench.claim("w1", free=1)
        await bench.claim("w1", free=1)  # and has room for another one
        await listening.sunsubscribe()
        while (await listening.get_message(timeout=5))["type"] != "sunsubscribe":
            pass  # the bell
    unheard = await bench.submit()
    assert isinstance(unheard, Submitted)
    assert (unheard.position, unheard.eta_s) == (1, None)
