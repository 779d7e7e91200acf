"""What is left of a task once its result has expired."""

from typing import Any

import pytest
from tests.support.script_bench import SHARD, Bench
from tests.support.tombs import SPAN_MS, tombs_of

from millstream.shared.schemas import new_task_id
from millstream.shared.steps import Refused

DAY_MS = 86_400_000


async def ended(bench: Bench, result_ttl_s: int = 10, task_id: str | None = None) -> str:
    task_id = await bench.task(task_id=task_id or new_task_id(0))
    await bench.scripts.stop(SHARD, task_id=task_id, caller="ann", result_ttl_s=result_ttl_s)
    return task_id


async def found(bench: Bench, task_id: str, caller: str = "ann") -> Any:
    arguments = {"task_id": task_id, "caller": caller, "pod": "", "after": 0, "count": 1}
    return await bench.scripts.follow(SHARD, **arguments)


async def forget(bench: Bench, task_id: str) -> None:
    """As Redis does when its time has come."""
    assert await bench.client.delete(SHARD.task(task_id), SHARD.log(task_id)) == 2


@pytest.mark.parametrize("result_ttl_s", [10, 86_400])
async def test_it_lies_with_those_that_expire_in_the_same_quarter_of_a_day(
    bench: Bench, result_ttl_s: int
) -> None:
    task_id = await ended(bench, result_ttl_s)
    expires_ms = await bench.client.pexpiretime(SHARD.task(task_id))
    span = expires_ms // SPAN_MS
    head, mark = task_id[3:5], task_id[5:17].encode()
    key = SHARD.tombs(span, head)
    assert await bench.client.hgetall(key) == {mark: b"ann"}
    assert await bench.client.pexpiretime(key) == (span + 1) * SPAN_MS + DAY_MS
    other = f"t0-{head}{new_task_id(0)[5:]}"
    await ended(bench, result_ttl_s, other)
    if await bench.client.pexpiretime(SHARD.task(other)) // SPAN_MS == span:
        assert await bench.client.hlen(key) == 2
    assert await bench.client.object("encoding", key) == b"listpack"


async def test_it_is_found_for_a_day(bench: Bench) -> None:
    task_id = await ended(bench)
    await forget(bench, task_id)
    (key,) = await tombs_of(bench.client, task_id)
    _, _, _, span, head = key.decode().rsplit(":", 4)
    # As if it had expired so many quarters of a day before.
    for back, answer in ((0, "expired"), (1, "expired"), (4, "expired"), (6, "unknown")):
        moved = SHARD.tombs(int(span) - back, head)
        await bench.client.rename(key, moved)
        assert await found(bench, task_id) == answer, back
        assert await found(bench, task_id, "bob") == "unknown"
        key = moved


async def test_many_take_little_memory(bench: Bench) -> None:
    """120 bytes a tomb, as keys of their own, were what a store grew by for a day."""
    await bench.client.config_set("hash-max-listpack-value", 65536)
    head = "aa"
    ids = [f"t0-{head}{new_task_id(0)[5:]}" for _ in range(200)]
    for task_id in ids:
        await ended(bench, 10, task_id)
    keys = {key for task_id in (ids[0], ids[-1]) for key in await tombs_of(bench.client, task_id)}
    taken = sum([await bench.client.memory_usage(key) for key in keys])
    assert taken / len(ids) < 32


async def test_who_deletes_digs_up(bench: Bench) -> None:
    kept, gone = await ended(bench), await ended(bench)
    assert await bench.scripts.delete(SHARD, task_id=gone, caller="ann", result_ttl_s=10)
    await forget(bench, kept)
    assert await found(bench, kept) == "expired"
    assert await found(bench, gone) == "unknown"
    assert not await tombs_of(bench.client, gone)


async def test_a_submit_sent_again_after_its_result_has_expired_makes_no_task(
    bench: Bench,
) -> None:
    task_id = await ended(bench)
    await forget(bench, task_id)
    answer = await bench.submit(task_id=task_id)
    assert isinstance(answer, Refused)
    assert await bench.claim("w") == []


async def test_an_older_version_s_tomb_is_found(bench: Bench) -> None:
    task_id = new_task_id(0)
    await bench.client.set(SHARD.tomb(task_id), "ann", ex=60)
    assert await found(bench, task_id) == "expired"
    assert await found(bench, task_id, "bob") == "unknown"


async def test_a_key_of_another_type_costs_the_tomb_alone(bench: Bench) -> None:
    task_id = await ended(bench)
    (key,) = await tombs_of(bench.client, task_id)
    await bench.client.set(key, "x", ex=60)
    beside = await ended(bench, 10, f"{task_id[:5]}{new_task_id(0)[5:]}")
    assert [event.kind for event in await bench.log(beside)] == ["cancelled"]
    await forget(bench, beside)
    assert await found(bench, beside) == "unknown"
