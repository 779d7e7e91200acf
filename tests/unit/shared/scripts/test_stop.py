"""Stopped, deleted and forgotten tasks."""

from typing import Any

import pytest
from tests.support.script_bench import SHARD, Bench, row
from tests.support.tombs import tombs_of

from millstream.shared.events import Event, decode_pod_message
from millstream.shared.steps import (
    ENDED,
    MISSING,
    SHORT,
)


async def test_stop_while_queued(bench: Bench) -> None:
    task_id = await bench.task()
    assert await bench.stop(task_id, "bob") == ("unknown", 0, 0, False)
    assert await bench.stop(task_id) == ("cancelled", 0, 0, True)
    assert await bench.stop(task_id) == ("cancelled", 0, 0, False)
    assert await bench.claim("w1") == []
    assert [(event.seq, event.kind) for event in await bench.log(task_id)] == [(1, "cancelled")]


async def test_stop_while_running_is_the_last_event(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1")
    await bench.append(row(claim, 1, "a", "b"))
    assert await bench.stop(claim.task_id) == ("cancelled", 5, 2, True)
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
    assert not await bench.client.exists(SHARD.task(task_id), SHARD.log(task_id))
    assert not await tombs_of(bench.client, task_id)
    assert await bench.queue_length() == 0
    assert await bench.stop(task_id) == ("unknown", 0, 0, False)
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


async def test_stop_after_the_end_changes_nothing(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1")
    await bench.append(row(claim, 1, "a", outcome="completed", detail="stop"))
    assert await bench.stop(claim.task_id) == ("completed", 5, 1, False)
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
