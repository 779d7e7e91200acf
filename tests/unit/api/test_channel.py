"""A pod's channel: what was told is kept until it can be put back."""

import asyncio

import pytest
from tests.support.store import Store
from tests.support.waiting import until

from millstream.api import shown as shown_module
from millstream.api.channel import Channel
from millstream.api.shown import AT_ONCE, Shown
from millstream.shared.connection import RedisError, open_redis
from millstream.shared.events import Event
from millstream.shared.keys import Keys
from millstream.shared.schemas import new_task_id
from millstream.shared.scripts import Scripts
from millstream.shared.steps import AppendRow, LogPage

SHARD = Keys(0)


async def test_nothing_is_forgotten_while_writes_are_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A primary that has lost its replicas takes pulses, and no writes."""
    monkeypatch.setattr(shown_module, "KEEP_S", 0.0)
    async with open_redis(store.url) as client:
        scripts = Scripts(client)
        task_id, told = await _told_and_lost(scripts)
        shown = Shown(scripts, result_ttl_s=60)
        shown.note(task_id, told)
        channel = Channel(
            store.url, scripts, shown, shard=0, pod_id="p",
            on_open=lambda: None, on_ready=lambda: None,
            on_events=lambda _: None, on_rewound=lambda _: None,
        )  # fmt: skip
        store.configure("min-replicas-to-write", 1)
        running = asyncio.create_task(channel.run())
        await until(lambda: channel._subscription.open)
        for _ in range(3):
            await channel.prove()
        assert channel.session is None
        store.configure("min-replicas-to-write", 0)
        await until(lambda: channel.session is not None)
        page = await scripts.follow(SHARD, task_id=task_id, caller="ann", pod="", after=0, count=9)
        assert isinstance(page, LogPage)
        assert [event.data for event in page.events] == ['"a"', '"b"', '"c"']
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_what_was_put_back_is_not_put_back_again_after_an_error(scripts: Scripts) -> None:
    shown = Shown(scripts, result_ttl_s=60)
    pairs = [await _told_and_lost(scripts) for _ in range(AT_ONCE + 2)]
    for task_id, told in pairs:
        shown.note(task_id, told)
    client = scripts._client
    first, *_, last = [task_id for task_id, _ in pairs]
    seq = await client.hget(SHARD.task(last), "seq")
    await client.hset(SHARD.task(last), "seq", "no number")  # what it meets is an error
    done = set[str]()
    with pytest.raises(RedisError):
        await shown.put_back(0, done=done)
    assert done == {task_id for task_id, _ in pairs} - {last}
    await client.delete(SHARD.log(first))
    await client.hset(SHARD.task(last), "seq", seq)
    assert await shown.put_back(0, done=done) == ([], False)
    assert [await client.xlen(SHARD.log(task_id)) for task_id, _ in pairs] == (
        [0] + [3] * (AT_ONCE + 1)
    )
    # After another loss of the connection all of it is in doubt again.
    await client.hset(SHARD.task(first), "seq", 0)
    assert await shown.put_back(0, done=set()) == ([], False)
    assert await client.xlen(SHARD.log(first)) == 3


async def _told_and_lost(scripts: Scripts) -> tuple[str, list[Event]]:
    """A task of which three events were read, and of which Redis has but one."""
    task_id = new_task_id(0)
    await scripts.submit(
        SHARD, task_id=task_id, model="m", caller="ann", request=b"{}", max_queue=99,
        live_ttl_s=60,
    )  # fmt: skip
    (claim,), _ = await scripts.claim(
        SHARD, worker="w", model="m", free=1, running=0, lease_s=60, max_attempts=3,
        max_task_s=60, sweep=True, live_ttl_s=60, result_ttl_s=60,
    )  # fmt: skip
    row = AppendRow(task_id, claim.attempt, 1, 1, [("1", '"a"')])
    assert await scripts.append(SHARD, worker="w", model="m", result_ttl_s=60, rows=[row]) == [1]
    return task_id, [Event(n, "t", str(n), f'"{text}"') for n, text in enumerate("abc", 1)]
