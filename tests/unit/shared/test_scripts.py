"""Every atomic step on a real Valkey: what it does, what it refuses, and that it may repeat."""

import asyncio
import os
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError

from millstream.shared.connection import open_subscriber
from millstream.shared.events import Event, decode_pod_message
from millstream.shared.keys import Keys
from millstream.shared.queue_depth import ClassDepth, QueueDepth
from millstream.shared.schemas import new_task_id
from millstream.shared.scripts import Scripts
from millstream.shared.states import Priority
from millstream.shared.steps import (
    ENDED,
    MISSING,
    SHORT,
    STALE,
    AppendRow,
    Claim,
    LogPage,
    Refused,
    Submitted,
)

SHARD = Keys(0)
LEASE_S = 0.15


class Bench:
    """The scripts with the arguments that matter to no test filled in."""

    def __init__(self, scripts: Scripts) -> None:
        self.scripts = scripts
        self.client: Any = scripts._client
        self.workers: dict[tuple[str, int], str] = {}

    async def submit(self, **changes: Any) -> Submitted | Refused:
        arguments = {
            "task_id": new_task_id(0),
            "model": "m",
            "caller": "ann",
            "request": b"{}",
            "max_queue": 10,
            "live_ttl_s": 100,
            **changes,
        }
        return await self.scripts.submit(SHARD, **arguments)

    async def task(self, **changes: Any) -> str:
        answer = await self.submit(**changes)
        assert isinstance(answer, Submitted)
        return answer.task_id

    async def claim(self, worker: str, **changes: Any) -> list[Claim]:
        return (await self.claim_and_waiting(worker, **changes))[0]

    async def claim_and_waiting(self, worker: str, **changes: Any) -> tuple[list[Claim], int]:
        arguments = {
            "model": "m",
            "free": 10,
            "running": 0,
            "lease_s": LEASE_S,
            "max_attempts": 3,
            "live_ttl_s": 100,
            "result_ttl_s": 10,
            "max_task_s": 60,
            "sweep": True,
            **changes,
        }
        claims, waiting = await self.scripts.claim(SHARD, worker=worker, **arguments)
        self.workers |= {(claim.task_id, claim.attempt): worker for claim in claims}
        return claims, waiting

    async def append(self, *rows: AppendRow) -> list[int]:
        worker = self.workers[rows[0].task_id, rows[0].attempt]
        return await self.scripts.append(
            SHARD, worker=worker, model="m", result_ttl_s=10, rows=rows
        )

    async def restore(self, task_id: str, *events: Event) -> str:
        return await self.scripts.restore(SHARD, task_id=task_id, result_ttl_s=10, events=events)

    async def memory(self) -> dict[bytes, bytes]:
        """All that Redis holds."""
        return {key: await self.client.dump(key) async for key in self.client.scan_iter()}

    async def go_back(self, memory: dict[bytes, bytes]) -> None:
        """Lose all that was written since."""
        await self.client.flushdb()
        for key, value in memory.items():
            await self.client.restore(key, 100_000, value)

    async def log(self, task_id: str, after: int = 0) -> list[Event]:
        page = await self.scripts.follow(
            SHARD, task_id=task_id, caller="ann", pod="", after=after, count=1000
        )
        assert isinstance(page, LogPage)
        return page.events

    async def state(self, task_id: str) -> str:
        return (await self.scripts.task_fields(SHARD, task_id))["state"]

    async def stop(self, task_id: str, caller: str = "ann") -> tuple[str, int, int]:
        return await self.scripts.stop(SHARD, task_id=task_id, caller=caller, result_ttl_s=10)

    async def renew(self, worker: str, claim: Claim) -> int:
        (answer,) = await self.scripts.renew(
            SHARD, worker=worker, model="m", live_ttl_s=100, result_ttl_s=10,
            tasks=[(claim.task_id, claim.attempt)],
        )  # fmt: skip
        return answer

    async def lapse(self) -> None:
        """Let the lease of what is claimed lapse."""
        queue = SHARD.queue("m")
        while True:
            rows = await self.client.xpending_range(queue, "workers", "-", "+", 100)
            if all(row["time_since_delivered"] > LEASE_S * 1000 for row in rows):
                return
            await asyncio.sleep(0.01)

    async def pass_deadline(self, task_id: str) -> None:
        """Let a task be one that was to end within 2.5 s of long ago."""
        times = {"created": 1000, "deadline": 3500}
        await self.client.hset(SHARD.task(task_id), mapping=times)
        await self.client.zadd(SHARD.due(), {task_id: times["deadline"]})

    async def queue_length(self) -> int:
        return await self.client.xlen(SHARD.queue("m"))


@pytest.fixture
async def pubsub(redis_url: str) -> AsyncIterator[Any]:
    """Where the shard's channels are."""
    async with open_subscriber(redis_url, SHARD.tag) as client:
        yield client.pubsub()


@pytest.fixture
def bench(scripts: Scripts) -> Bench:
    return Bench(scripts)


def row(task: Claim, first: int, *texts: str, outcome: str = "", detail: str = "") -> AppendRow:
    events = [(str(100 + first + n), f'"{text}"') for n, text in enumerate(texts)]
    return AppendRow(task.task_id, task.attempt, 5, first, events, outcome, detail)


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
    await bench.client.hset(SHARD.rate("m"), "back", 0)  # they should have come by now
    assert await refused_for(bench) == 0.5
    assert running


async def test_several_tasks_are_taken_together_or_not_at_all(bench: Bench) -> None:
    ids = [new_task_id(0) for _ in range(3)]
    wanted = {"task_id": ids[0], "request": b"0", "more": [(ids[1], b"1"), (ids[2], b"2")]}
    await bench.task()
    refused = await bench.submit(**wanted, max_queue=3)
    assert refused == Refused(conflict=False, retry_after_s=3 * 1.25)
    assert await bench.queue_length() == 1
    for _ in range(2):  # the answer to the first was lost
        assert await bench.submit(**wanted, max_queue=4) == Submitted(tuple(ids), False, 2, None)
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
    assert await bench.submit(**wanted()) == Submitted(first.task_ids, True, 0, 0.0)
    assert await bench.queue_length() == 2


async def test_idempotency_is_per_caller_and_body(bench: Bench) -> None:
    first = await bench.submit(idempotency_key="k", body_hash="1")
    again = await bench.submit(idempotency_key="k", body_hash="1")
    assert isinstance(first, Submitted)
    assert again == Submitted(first.task_ids, True, 0, 0.0)
    assert await bench.submit(idempotency_key="k", body_hash="2") == Refused(True, 0)
    other = await bench.submit(idempotency_key="k", body_hash="2", caller="bob")
    assert isinstance(other, Submitted)
    assert not other.known
    assert await bench.queue_length() == 2


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


async def test_stop_while_queued(bench: Bench) -> None:
    task_id = await bench.task()
    assert await bench.stop(task_id, "bob") == ("unknown", 0, 0)
    assert await bench.stop(task_id) == ("cancelled", 0, 0)
    assert await bench.stop(task_id) == ("cancelled", 0, 0)
    assert await bench.claim("w1") == []
    assert [(event.seq, event.kind) for event in await bench.log(task_id)] == [(1, "cancelled")]


async def test_stop_while_running_is_the_last_event(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1")
    await bench.append(row(claim, 1, "a", "b"))
    assert await bench.stop(claim.task_id) == ("cancelled", 5, 2)
    assert await bench.append(row(claim, 3, "c")) == [ENDED]
    assert await bench.renew("w1", claim) == ENDED
    log = await bench.log(claim.task_id)
    assert [event.kind for event in log] == ["t", "t", "cancelled"]
    assert log[-1].body["usage"]["completion_tokens"] == 2
    await bench.lapse()
    assert await bench.claim("w2") == []  # B35: never runs again


async def test_stop_of_a_dead_owner_s_task(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1")
    await bench.lapse()
    assert (await bench.stop(claim.task_id))[0] == "cancelled"
    assert await bench.claim("w2") == []


@pytest.mark.parametrize("state", ["queued", "running", "completed"])
async def test_a_deleted_task_has_never_been(bench: Bench, pubsub: Any, state: str) -> None:
    task_id = await bench.task()
    claims = [] if state == "queued" else await bench.claim("w")
    if state == "completed":
        await bench.append(row(claims[0], 1, "a", outcome="completed", detail="stop"))
    else:
        await bench.scripts.follow(SHARD, task_id=task_id, caller="ann", pod="p", after=0, count=10)
    await pubsub.ssubscribe(SHARD.pod("p"))
    assert not await bench.scripts.delete(SHARD, task_id=task_id, caller="bob", result_ttl_s=10)
    assert await bench.state(task_id) == state
    assert await bench.scripts.delete(SHARD, task_id=task_id, caller="ann", result_ttl_s=10)
    for key in (SHARD.task(task_id), SHARD.log(task_id), SHARD.tomb(task_id)):
        assert not await bench.client.exists(key)
    assert await bench.queue_length() == 0
    assert await bench.stop(task_id) == ("unknown", 0, 0)
    follow = bench.scripts.follow(SHARD, task_id=task_id, caller="ann", pod="p", after=0, count=10)
    assert await follow == "unknown"
    assert not await bench.scripts.delete(SHARD, task_id=task_id, caller="ann", result_ttl_s=10)
    if state == "running":  # its worker drops it, and nobody takes it up
        assert await bench.append(row(claims[0], 1, "a")) == [MISSING]
        await bench.lapse()
    assert await bench.claim("other") == []
    assert await bench.restore(task_id, Event(1, "t", "1", '"a"')) == "unknown"
    if state != "completed":  # who read it live has seen its end
        message = None
        while message is None:
            message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=5)
        ((told, events),) = decode_pod_message(message["data"])
        assert (told, [event.kind for event in events]) == (task_id, ["cancelled"])
    await pubsub.aclose()


async def test_a_stop_that_is_put_back_waits_for_its_text(bench: Bench, pubsub: Any) -> None:
    async def stop(least_tokens: int) -> tuple[str, int, int]:
        return await bench.scripts.stop(
            SHARD, task_id=task_id, caller="ann", result_ttl_s=10, least_tokens=least_tokens
        )

    task_id = await bench.task()
    assert await stop(2) == SHORT  # the claim was lost as well
    (claim,) = await bench.claim("w1")
    await bench.append(row(claim, 1, "a"))
    assert await stop(2) == SHORT
    assert await bench.state(task_id) == "running"
    await pubsub.ssubscribe(SHARD.control("w1"))
    await bench.append(row(claim, 2, "b"))
    assert (await stop(2))[0] == "cancelled"
    assert (await stop(9))[0] == "cancelled"  # it has ended, and that stays
    end = (await bench.log(task_id))[-1]
    message = None
    while message is None or not message["data"].startswith(b"stop"):
        message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=5)
    assert message["data"].decode() == f"stop {task_id} 1 {end.seq} {end.data}"
    await pubsub.aclose()


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


async def test_stop_after_the_end_changes_nothing(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1")
    await bench.append(row(claim, 1, "a", outcome="completed", detail="stop"))
    assert await bench.stop(claim.task_id) == ("completed", 5, 1)
    assert len(await bench.log(claim.task_id)) == 2


async def test_expired_is_told_from_unknown_to_its_caller_alone(bench: Bench) -> None:
    task_id = await bench.task()
    await bench.stop(task_id)
    await bench.client.delete(SHARD.task(task_id), SHARD.log(task_id))
    arguments = {"task_id": task_id, "pod": "", "after": 0, "count": 1}
    assert await bench.scripts.follow(SHARD, caller="ann", **arguments) == "expired"
    assert await bench.scripts.follow(SHARD, caller="bob", **arguments) == "unknown"
    assert (await bench.stop(task_id))[0] == "expired"
    assert (await bench.stop(task_id, "bob"))[0] == "unknown"


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


async def test_append_to_a_task_that_is_gone(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1")
    await bench.client.delete(SHARD.task(claim.task_id))
    assert await bench.append(row(claim, 1, "a")) == [MISSING]
    assert await bench.client.exists(SHARD.log(claim.task_id)) == 0


async def test_followers_hear_each_event_once(bench: Bench, pubsub: Any) -> None:
    await pubsub.ssubscribe(SHARD.pod("p1"))
    ids = [await bench.task(), await bench.task()]
    claims = await bench.claim("w1")
    for task_id in ids:
        for _ in range(2):  # following twice is following once
            await bench.scripts.follow(
                SHARD, task_id=task_id, caller="ann", pod="p1", after=0, count=1
            )
    await bench.append(*(row(claim, 1, "a", "é\U0001f600") for claim in claims))
    await bench.scripts.unfollow(SHARD, pod="p1", task_ids=[ids[1]])
    await bench.append(
        *(row(claim, 3, "b", outcome="completed", detail="stop") for claim in claims)
    )
    heard: list[tuple[str, list[Event]]] = []
    while len(heard) < 4:
        message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=5)
        if message is not None:
            heard += decode_pod_message(message["data"])
    assert sorted(
        (task_id, [event.seq for event in events]) for task_id, events in heard
    ) == sorted([(ids[0], [1, 2]), (ids[1], [1, 2]), (ids[0], [3]), (ids[0], [4])])
    assert heard[0][1][1].text == "é\U0001f600"
    await pubsub.aclose()


async def test_a_pod_that_nobody_hears_is_struck_off(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1")
    await bench.scripts.follow(
        SHARD, task_id=claim.task_id, caller="ann", pod="gone", after=0, count=1
    )
    fields = await bench.scripts.task_fields(SHARD, claim.task_id)
    assert fields["followers"] == "gone"
    await bench.append(row(claim, 1, "a"))
    fields = await bench.scripts.task_fields(SHARD, claim.task_id)
    assert fields["followers"] == ""


async def test_an_answer_nobody_can_get_is_not_decoded_on(bench: Bench) -> None:
    for orphan_s, outcome in ((0.05, ENDED), (0, 3)):
        await bench.task(orphan_s=orphan_s)
        (claim,) = await bench.claim("w1")
        follow = {"task_id": claim.task_id, "caller": "ann", "after": 0, "count": 1}
        await bench.scripts.follow(SHARD, pod="dead", **follow)
        assert await bench.append(row(claim, 1, "a")) == [1]  # strikes the pod off
        assert await bench.append(row(claim, 2, "b")) == [2]  # unheard from here
        await asyncio.sleep(0.06)
        assert await bench.append(row(claim, 3, "c")) == [outcome]
    assert (await bench.stop(claim.task_id))[0] == "cancelled"


async def test_a_pod_that_comes_back_keeps_its_task(bench: Bench) -> None:
    await bench.task(orphan_s=0.05)
    (claim,) = await bench.claim("w1")
    follow = {"task_id": claim.task_id, "caller": "ann", "after": 0, "count": 1}
    await bench.append(row(claim, 1, "a"))
    await asyncio.sleep(0.06)
    await bench.scripts.follow(SHARD, pod="back", **follow)
    assert await bench.append(row(claim, 2, "b")) == [2]
    assert await bench.append(row(claim, 3, "c")) == [3]


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


async def test_follow_reads_from_any_number(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1")
    await bench.append(row(claim, 1, *"abcdefghij"))
    for after in range(11):
        events = await bench.log(claim.task_id, after)
        assert [event.seq for event in events] == list(range(after + 1, 11))


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


async def test_entries_of_tasks_that_expired_are_cleared(bench: Bench) -> None:
    task_id = await bench.task()
    await bench.client.delete(SHARD.task(task_id))
    assert await bench.claim("w1") == []
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


async def test_scripts_survive_a_script_flush(bench: Bench) -> None:
    await bench.task()
    await bench.client.script_flush()
    (claim,) = await bench.claim("w1")
    await bench.client.script_flush()
    assert await bench.append(row(claim, 1, "a")) == [1]


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
    for name in (shard.turns("x", "y"), shard.spent("x", "y")):
        head = name.removeprefix(shard.tag).removesuffix("x:y")
        assert f"tag .. '{head}' .. level .. ':' .. model" in text


# What Redis lost and somebody remembers.


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
