"""A reader's buffer is in order, without a gap, and bounded; a feed expects what it has made."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, settings, strategies as st
from tests.support.script_bench import SHARD, Bench, row
from tests.support.waiting import eventually, until

from millstream.api import feed as feed_module
from millstream.api.feed import BUFFER_CHARS, Feed, Reader
from millstream.api.shown import Shown
from millstream.shared.cancellation import cancel_until_done
from millstream.shared.events import Event
from millstream.shared.schemas import new_task_id
from millstream.shared.scripts import Scripts


def events(first: int, last: int) -> list[Event]:
    return [Event(seq, "t", "1", f'"{seq}"') for seq in range(first, last + 1)]


def caught_up(next_seq: int) -> Reader:
    reader = Reader("t")
    reader.begin_catch_up()
    reader.end_catch_up(next_seq)
    return reader


async def test_events_join_on() -> None:
    reader = caught_up(5)
    reader.offer(events(5, 6))
    reader.offer(events(7, 7))
    assert reader.take() == events(5, 7)
    assert reader.take() == []


async def test_what_was_seen_is_left_out() -> None:
    reader = caught_up(5)
    reader.offer(events(3, 6))
    reader.offer(events(5, 7))
    assert reader.take() == events(5, 7)


async def test_a_gap_means_behind() -> None:
    reader = caught_up(5)
    reader.offer(events(5, 5))
    reader.offer(events(7, 7))
    assert reader.behind
    assert reader.take() == []


async def test_events_during_the_read_join_on_to_it() -> None:
    reader = Reader("t")
    reader.begin_catch_up()
    reader.offer(events(8, 9))  # published while the log is read
    reader.offer(events(10, 10))
    reader.end_catch_up(9)  # the log gave up to 8
    assert not reader.behind
    assert reader.take() == events(9, 10)


async def test_a_hole_between_read_and_feed_means_behind() -> None:
    reader = Reader("t")
    reader.begin_catch_up()
    reader.offer(events(8, 9))
    reader.end_catch_up(7)
    assert reader.behind


async def test_a_slow_reader_falls_behind_and_holds_nothing() -> None:
    reader = caught_up(1)
    for seq in range(1, 1000):
        reader.offer([Event(seq, "t", "1", '"' + "x" * 1000 + '"')])
        if reader.behind:
            break
    assert seq * 1002 <= BUFFER_CHARS + 2004
    assert reader.take() == []


async def test_waking_ends_a_wait() -> None:
    reader = caught_up(1)
    waiting = asyncio.create_task(reader.wait(60))
    await asyncio.sleep(0)
    reader.wake()
    await asyncio.wait_for(waiting, 5)


async def test_while_the_owner_waits_events_go_by_the_shortcut_as_long_as_it_takes_them() -> None:
    sent: list[Event] = []
    takes = True

    def shortcut(events: Sequence[Event]) -> bool:
        if takes:
            sent.extend(events)
        return takes

    reader = Reader("t", shortcut)
    reader.begin_catch_up()
    reader.end_catch_up(1)
    assert not reader.offer(events(1, 1))  # nobody waits yet
    assert reader.take() == events(1, 1)
    waiting = asyncio.create_task(reader.wait(60))
    await asyncio.sleep(0)
    assert reader.offer(events(2, 3))
    assert not reader.offer(events(4, 4))  # asked for once
    assert reader.flush() == sent == events(2, 4)
    assert reader.next_seq == 5
    await asyncio.sleep(0)
    assert not waiting.done()
    takes = False
    assert reader.offer(events(5, 5))
    assert reader.flush() == ()
    await asyncio.wait_for(waiting, 5)
    assert not reader.offer(events(6, 6))
    assert reader.take() == events(5, 6)


@settings(deadline=None)  # a machine may have other things to do
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)), max_size=30), st.integers(1, 30))
def test_whatever_comes_is_contiguous_or_behind(
    offers: list[tuple[int, int]], next_seq: int
) -> None:
    async def run() -> None:
        reader = caught_up(next_seq)
        expected = next_seq
        for first, more in offers:
            reader.offer(events(first, first + more))
            if reader.behind:
                return
            for event in reader.take():
                assert event.seq == expected
                expected += 1

    asyncio.run(run())


@pytest.fixture
def feed(redis_url: str, scripts: Scripts) -> Feed:
    return Feed(redis_url, scripts, Shown(scripts, result_ttl_s=10), pod_id="p", shards=1)


@pytest.fixture
async def listening(feed: Feed) -> AsyncIterator[Feed]:
    running = asyncio.create_task(feed.run())
    await until(lambda: feed.session("t0-x"))
    yield feed
    await cancel_until_done([running])


async def test_what_comes_before_its_owner_waits_for_it(listening: Feed, scripts: Scripts) -> None:
    bench, task_id = Bench(scripts), new_task_id(0)
    assert listening.expect([task_id]) == "p"
    await bench.task(task_id=task_id, pod="p")
    (claim,) = await bench.claim("w")
    await bench.append(row(claim, 1, "a", "b"))
    (reader,) = listening._readers[task_id]
    await asyncio.wait_for(reader.wait(10), 10)
    with listening.reading(task_id) as other:
        assert other.behind  # whoever else comes asks the log whose it is
    with listening.reading(task_id, expected=True) as owned:
        assert owned is reader
        assert not owned.behind
        assert [event.data for event in owned.take()] == ['"a"', '"b"']
    with listening.reading(task_id, expected=True) as late:
        assert late.behind


async def test_what_was_not_made_is_nobodys(listening: Feed) -> None:
    task_ids = [new_task_id(0), new_task_id(0)]
    listening.expect(task_ids)
    assert listening.streams == 2
    listening.dismiss(task_ids)
    assert listening.streams == 0
    assert not listening._left
    with listening.reading(task_ids[0], expected=True) as reader:
        assert reader.behind


async def test_a_deaf_feed_expects_nothing(feed: Feed) -> None:
    assert feed.expect(["t0-x"]) == ""
    with feed.reading("t0-x", expected=True) as reader:
        assert reader.behind


async def test_a_lost_subscription_puts_what_is_expected_behind(listening: Feed) -> None:
    assert listening.expect(["t0-x"]) == "p"
    (channel,) = listening._channels
    session = listening.session("t0-x")
    channel._subscription.drop()
    await until(lambda: listening.session("t0-x") not in (None, session))
    with listening.reading("t0-x", expected=True) as reader:
        assert reader.behind


async def test_what_nobody_comes_to_own_is_followed_no_more(
    listening: Feed, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "PULSE_S", 0.02)
    bench, task_id = Bench(scripts), new_task_id(0)
    listening.expect([task_id])
    await bench.task(task_id=task_id, pod="p")
    pulse = asyncio.create_task(listening.pulse())

    async def struck_off() -> bool:
        return (await scripts.task_fields(SHARD, task_id))["followers"] == ""

    await eventually(struck_off)
    assert listening.streams == 0
    await cancel_until_done([pulse])
