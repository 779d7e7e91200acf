"""A new task that nobody waits before is started for a worker that has room, and sent to it."""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from tests.support.script_bench import CALLED, LEASE_S, SHARD, Bench, row

from millstream.shared.keys import CLASSES
from millstream.shared.states import Priority
from millstream.shared.steps import MISSING, STALE, Claim

Listen = Callable[..., Awaitable[None]]
UNIT = 1 / 4096


@pytest.fixture
async def listen(pubsub: Any) -> Listen:
    """Have workers hear of tasks."""

    async def begin(*workers: str) -> None:
        await pubsub.ssubscribe(*map(SHARD.run, workers))
        for _ in workers:
            assert (await pubsub.get_message(timeout=5))["type"] == "ssubscribe"

    return begin


async def heard(pubsub: Any, bench: Bench) -> tuple[str, Claim]:
    """The worker that was sent a task, and the task."""
    message = await pubsub.get_message(timeout=5)
    worker, claim = message["channel"].decode().rpartition(":")[2], Claim.sent(message["data"])
    bench.workers[claim.task_id, claim.attempt] = worker
    return worker, claim


async def owner(bench: Bench) -> list[tuple[bytes, int]]:
    """Whose each entry is, and how long its lease has run, in whole seconds."""
    rows = await bench.client.xpending_range(SHARD.queue("m"), "workers", "-", "+", 100)
    return [(row["consumer"], row["time_since_delivered"] // 1000) for row in rows]


async def counters(bench: Bench) -> dict[str, Any]:
    """Where the fair queue's counters stand."""
    client = bench.client
    levels = (CLASSES, *Priority)
    told = {
        f"{kind} {level}": await client.zrange(key(level, "m"), 0, -1, withscores=True)
        for level in levels
        for kind, key in (("turns", SHARD.turns), ("spent", SHARD.spent))
    }
    return told | {"clocks": await client.hgetall(SHARD.fair("m"))}


async def test_it_is_as_if_the_worker_had_claimed_it(
    bench: Bench, pubsub: Any, listen: Listen
) -> None:
    await listen("w1")
    assert await bench.claim("w1", sendable=True, free=3) == []
    answer = await bench.submit(request=b'{"a": "\xc3\xa9"}', priority=Priority.BATCH)
    assert (answer.position, answer.eta_s) == (1, 0)
    worker, claim = await heard(pubsub, bench)
    assert worker == "w1"
    assert claim == Claim(answer.task_id, 1, b'{"a": "\xc3\xa9"}', [], priority=Priority.BATCH)
    fields = await bench.scripts.task_fields(SHARD, claim.task_id)
    told = {name: fields[name] for name in ("state", "attempt", "worker", "seq", "tokens")}
    assert told == {"state": "running", "attempt": "1", "worker": "w1", "seq": "0", "tokens": "0"}
    assert fields["started"] == fields["created"]
    assert float(fields["paid"]) == len(claim.request) / 4 + 128
    assert await owner(bench) == [(b"w1", 0)]
    assert await bench.client.zcard(SHARD.line("m")) == 0
    assert await bench.client.zscore(SHARD.due(), claim.task_id) == int(fields["deadline"])
    assert await bench.idle() == {b"w1": CALLED + 1 + 3 * UNIT}
    assert await bench.renew("w1", claim) == 1
    assert await bench.append(row(claim, 1, "a", outcome="completed", detail="stop")) == [2]
    assert await bench.idle() == {b"w1": 3 * UNIT}
    assert await bench.queue_length() == 0
    assert await owner(bench) == []


@pytest.mark.parametrize("many", [False, True], ids=["none has debts", "others have debts"])
async def test_its_caller_pays_as_who_waits_for_a_claim(
    bench: Bench, pubsub: Any, listen: Listen, many: bool
) -> None:
    """The same tasks on two shards' worth of keys: one worker listens, then none does."""
    told: list[dict[str, Any]] = []
    for listens in (False, True):
        await bench.client.flushdb()
        if many:
            for name, used in (("ann", 900.0), ("bob", 300.0), ("cy", 5.0)):
                tenant = (await bench.client.eval("return redis.sha1hex(ARGV[1])", 0, name))[:16]
                await bench.client.zadd(SHARD.spent("interactive", "m"), {tenant: used})
            await bench.client.hset(SHARD.fair("m"), mapping={"interactive": 100, CLASSES: 10})
        if listens:
            await listen("w1")
        for caller, weight in (("ann", 1), ("bob", 2), ("bob", 2), ("dan", 1)):
            await bench.claim("w1", sendable=listens)
            await bench.task(caller=caller, weight=weight)
            (claim,) = [(await heard(pubsub, bench))[1]] if listens else await bench.claim("w1")
            assert await bench.append(row(claim, 1, "a", outcome="completed", detail="stop")) == [2]
        told.append(await counters(bench))
    assert told[0] == told[1]
    assert len(told[0]["clocks"]) == 2


async def test_the_least_loaded_with_room_is_called_once(
    bench: Bench, pubsub: Any, listen: Listen
) -> None:
    await listen("w1", "w2", "w3")
    await bench.claim("w1", sendable=True, running=3)
    await bench.claim("w2", sendable=True, running=1, free=1)
    await bench.claim("w3", running=0)  # of an older version
    first = await bench.task()
    worker, claim = await heard(pubsub, bench)
    assert (worker, claim.task_id) == ("w2", first)
    second = await bench.task()  # w2 is frozen, for all that is known
    worker, other = await heard(pubsub, bench)
    assert (worker, other.task_id) == ("w1", second)
    assert await bench.append(row(claim, 1)) == [0]  # its prompt's length
    assert await bench.idle() == {b"w1": CALLED + 4 + 13 * UNIT, b"w2": 2 + 2 * UNIT, b"w3": 0}
    third = await bench.task()  # w2 has shown itself, and is full
    assert await bench.state(third) == "queued"


async def test_who_waits_goes_first(bench: Bench, listen: Listen) -> None:
    await listen("w1")
    waiting = await bench.task()
    await bench.client.zadd(SHARD.idle("m"), {"w1": 5 * UNIT})
    later = await bench.task()
    assert [await bench.state(task_id) for task_id in (waiting, later)] == ["queued", "queued"]


async def test_nobody_is_sent_what_it_would_not_hear(bench: Bench, pubsub: Any) -> None:
    """A worker of an older version has a bell alone, and one that is gone has none."""
    await pubsub.ssubscribe(SHARD.control("older"))
    await pubsub.get_message(timeout=5)
    await bench.claim("gone", sendable=True)
    await bench.claim("older", running=2)
    task_id = await bench.task()
    assert await bench.state(task_id) == "queued"
    assert (await pubsub.get_message(timeout=5))["data"] == b"new"
    assert await bench.idle() == {b"older": CALLED + 2}


async def test_choices_are_shared_out(bench: Bench, pubsub: Any, listen: Listen) -> None:
    await listen("w1", "w2")
    await bench.claim("w1", sendable=True)
    await bench.claim("w2", sendable=True, running=1)
    first, second, third = "t0-a", "t0-b", "t0-c"
    await bench.submit(task_id=first, more=[(second, b"{}"), (third, b"{}")])
    told = [await heard(pubsub, bench) for _ in range(2)]
    assert [(worker, claim.task_id) for worker, claim in told] == [("w1", first), ("w2", second)]
    assert await bench.state(third) == "queued"
    (claim,) = await bench.claim("w1", rung=True)
    assert claim.task_id == third


async def test_a_stop_comes_after_the_task(bench: Bench, pubsub: Any, listen: Listen) -> None:
    await listen("w1")
    await pubsub.ssubscribe(SHARD.control("w1"))
    await pubsub.get_message(timeout=5)
    await bench.claim("w1", sendable=True)
    task_id = await bench.task()
    await bench.stop(task_id)
    _, claim = await heard(pubsub, bench)
    assert (await pubsub.get_message(timeout=5))["data"].startswith(f"stop {task_id} 1 ".encode())
    assert await bench.append(row(claim, 1, "a")) == [-2]


@pytest.mark.parametrize("lost", ["frozen", "dead", "frozen while it ran"])
async def test_who_says_nothing_is_replaced_after_a_lease(
    bench: Bench, pubsub: Any, listen: Listen, lost: str
) -> None:
    """It can do nothing when it wakes; the loss counts where it may have to do with the task."""
    await listen("w1")
    await bench.claim("w1", sendable=True)
    await bench.task()
    _, first = await heard(pubsub, bench)
    if lost == "frozen while it ran":
        assert await bench.append(row(first, 1)) == [0]
    elif lost == "dead":
        await pubsub.sunsubscribe(SHARD.run("w1"))
        await pubsub.get_message(timeout=5)
    assert await bench.claim("w2", max_attempts=2) == []
    await bench.lapse()
    (second,) = await bench.claim("w2", max_attempts=2)
    assert (second.attempt, second.predecessor) == (2, "w1")
    fields = await bench.scripts.task_fields(SHARD, second.task_id)
    assert fields.get("lost", "0") == ("0" if lost == "frozen" else "1")
    assert second.suspect == (lost != "frozen")
    assert await bench.append(row(first, 1, "a")) == [STALE]
    assert await bench.append(row(second, 1, "a", outcome="completed", detail="stop")) == [2]


async def test_a_task_is_excused_once(bench: Bench, listen: Listen) -> None:
    """Whoever takes it over has claimed it, and has it."""
    await listen("w1", "w2")
    await bench.claim("w1", sendable=True)
    task_id = await bench.task()
    for worker in ("w2", "w3"):
        await bench.lapse()
        (claim,) = await bench.claim(worker, max_attempts=2)
    await bench.lapse()
    assert await bench.claim("w4", max_attempts=2) == []
    assert await bench.state(task_id) == "failed"
    assert claim.attempt == 3


async def test_what_it_was_sent_while_it_asked_takes_a_slot(
    bench: Bench, pubsub: Any, listen: Listen
) -> None:
    """A claim of which it knows as little as the claim of that."""
    await listen("w1")
    await bench.claim("w1", sendable=True, free=2)
    await bench.task()
    waiting = [await bench.task() for _ in range(2)]
    claims = await bench.claim("w1", sendable=True, free=2, running=0)
    assert [claim.task_id for claim in claims] == waiting[:1]
    assert await bench.idle() == {}
    _, sent = await heard(pubsub, bench)
    assert await bench.append(row(sent, 1, "a", outcome="completed", detail="stop")) == [2]
    assert await bench.claim("w1", sendable=True, free=1, running=1, sweep=False) != []


async def test_who_missed_it_finds_it(bench: Bench, listen: Listen) -> None:
    """As by `recover`: what is ours."""
    await listen("w1")
    await bench.claim("w1", sendable=True)
    task_id = await bench.task()
    (claim,) = await bench.claim("w1", recover=True, sweep=False)
    assert (claim.task_id, claim.attempt) == (task_id, 1)


async def test_who_drains_lets_go_of_what_it_has_not_heard_of(
    bench: Bench, pubsub: Any, listen: Listen
) -> None:
    await listen("w1")
    mine = await bench.task()
    (known,) = await bench.claim("w1", sendable=True)
    missed = await bench.task()

    async def let_go() -> int:
        return await bench.scripts.release(
            SHARD, worker="w1", model="m", lease_s=LEASE_S, blame="engine",
            tasks=[(mine, 1)], unheard=True,
        )  # fmt: skip

    assert await let_go() == 2
    assert await let_go() == 0  # the answer was lost
    assert await bench.idle() == {}
    claims = {claim.task_id: claim for claim in await bench.claim("w2")}
    assert {task_id: claim.handed_over for task_id, claim in claims.items()} == {
        known.task_id: False,
        missed: True,
    }
    later = await bench.task()  # it is sent no more
    assert await bench.state(later) == "queued"


async def test_a_lost_group_is_made_again(bench: Bench, pubsub: Any, listen: Listen) -> None:
    await listen("w1")
    await bench.claim("w1", sendable=True)
    await bench.client.delete(SHARD.queue("m"))
    await bench.task()
    _, claim = await heard(pubsub, bench)
    assert await owner(bench) == [(b"w1", 0)]
    assert await bench.append(row(claim, 1, "a", outcome="completed", detail="stop")) == [2]


async def test_a_submit_sent_again_starts_it_once(
    bench: Bench, pubsub: Any, listen: Listen
) -> None:
    await listen("w1")
    await bench.claim("w1", sendable=True)
    task_id = await bench.task()
    again = await bench.submit(task_id=task_id)
    assert (again.task_id, again.position) == (task_id, 0)
    await heard(pubsub, bench)
    assert await pubsub.get_message(timeout=0.05) is None
    assert await owner(bench) == [(b"w1", 0)]


async def test_a_letter_that_is_tried_again_is_sent(
    bench: Bench, pubsub: Any, listen: Listen
) -> None:
    fields = {"caller": "ann", "priority": "batch", "weight": "1", "request": "{}"}
    letter = (await bench.client.xadd(SHARD.dead("m"), fields)).decode()
    await listen("w1")
    await bench.claim("w1", sendable=True)
    answer = await bench.scripts.retry(
        SHARD, model="m", entry=letter, task_id="t0-new", max_queue=5, live_ttl_s=60
    )
    assert answer == "queued"
    _, claim = await heard(pubsub, bench)
    assert claim == Claim("t0-new", 1, b"{}", [], priority=Priority.BATCH)


async def test_what_is_no_task_is_no_claim() -> None:
    with pytest.raises(msgspec.MsgspecError):
        Claim.sent(b"new")


async def test_a_deleted_task_is_not_written(bench: Bench, pubsub: Any, listen: Listen) -> None:
    await listen("w1")
    await bench.claim("w1", sendable=True)
    task_id = await bench.task()
    await bench.scripts.delete(SHARD, task_id=task_id, caller="ann", result_ttl_s=10)
    _, claim = await heard(pubsub, bench)
    assert await bench.append(row(claim, 1, "a")) == [MISSING]
