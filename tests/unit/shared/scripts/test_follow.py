"""The log, and who hears of it."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.script_bench import SHARD, Bench, row

from millstream.shared.events import Event, decode_pod_message
from millstream.shared.schemas import new_task_id
from millstream.shared.steps import (
    ENDED,
    LogPage,
)


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


async def test_a_pod_that_submits_hears_all_from_the_first_event_on(
    bench: Bench, pubsub: Any
) -> None:
    await pubsub.ssubscribe(SHARD.pod("p1"))
    ids = [new_task_id(0) for _ in range(3)]
    for _ in range(2):  # sent again after a lost answer
        more = [(task_id, b"{}") for task_id in ids[1:]]
        assert await bench.task(task_id=ids[0], more=more, pod="p1") == ids[0]
    await bench.append(*(row(claim, 1, "a") for claim in await bench.claim("w1")))
    while (message := await pubsub.get_message(ignore_subscribe_messages=True, timeout=5)) is None:
        pass
    heard = decode_pod_message(message["data"])
    assert sorted(heard) == sorted((task_id, [Event(1, "t", "101", '"a"')]) for task_id in ids)
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


async def test_follow_reads_from_any_number(bench: Bench) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1")
    await bench.append(row(claim, 1, *"abcdefghij"))
    for after in range(11):
        events = await bench.log(claim.task_id, after)
        assert [event.seq for event in events] == list(range(after + 1, 11))


@pytest.mark.parametrize(
    ("lost", "wanted"), [((1,), 0), ((5, 6), 0), ((10,), 0), (range(1, 11), 0), ((5,), 4)]
)
async def test_a_log_with_a_hole_is_torn_for_whom_it_concerns(
    bench: Bench, lost: Sequence[int], wanted: int
) -> None:
    await bench.task()
    (claim,) = await bench.claim("w1")
    await bench.append(row(claim, 1, *"abcdefghij"))
    await bench.client.xdel(SHARD.log(claim.task_id), *(f"{number}-0" for number in lost))

    async def read(after: int, count: int) -> LogPage | str:
        return await bench.scripts.follow(
            SHARD, task_id=claim.task_id, caller="ann", pod="", after=after, count=count
        )

    assert await read(wanted, 1000) == "torn"
    for after in range(lost[-1], 11):  # who has what is missing reads on
        assert [event.seq for event in await bench.log(claim.task_id, after)] == list(
            range(after + 1, 11)
        )
    before = await read(0, lost[0] - 1)
    assert isinstance(before, LogPage)
    assert ([event.seq for event in before.events], before.seq) == (list(range(1, lost[0])), 10)
    assert await read(0, lost[0]) == "torn"


@pytest.mark.parametrize("lost", [(1,), (2,), (3,), (1, 2, 3)])
async def test_who_takes_over_is_told_of_a_hole(bench: Bench, lost: Sequence[int]) -> None:
    await bench.task()
    (claim,) = await bench.claim("dead")
    await bench.append(row(claim, 1, *"abc"))
    await bench.client.xdel(SHARD.log(claim.task_id), *(f"{number}-0" for number in lost))
    await bench.lapse()
    (again,) = await bench.claim("w")
    assert again.torn
    assert [(event.seq, event.ids, event.text) for event in again.log] == [
        (1, "", ""), (2, "", ""), (3, "", ""),
    ]  # fmt: skip
    assert await bench.append(row(again, 4, outcome="failed", detail="{}")) == [4]
    assert await bench.state(claim.task_id) == "failed"
