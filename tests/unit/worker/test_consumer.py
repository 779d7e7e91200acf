"""When a worker asks for work: not where it is sent some, at once where it had no free slot."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.support.script_bench import CALLED, SHARD, Bench
from tests.support.waiting import eventually, until

from millstream.shared.cancellation import cancel_until_done
from millstream.shared.connection import open_subscriber
from millstream.shared.keys import Keys
from millstream.shared.metrics.tally import Tally
from millstream.shared.schemas import new_task_id
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings
from millstream.worker import consumer
from millstream.worker.shutdown import Shutdown
from millstream.worker.worker import Worker

NEVER_S = 600.0


class OneWorker:
    """A worker in this process, and how often it has claimed."""

    def __init__(self, worker: Worker, bench: Bench) -> None:
        self.worker = worker
        self.bench = bench
        self._before = 0

    async def claimed(self, times: int) -> None:
        """Claims were answered so often since the last look, and no more come."""
        await until(lambda: self._count - self._before >= times)
        assert await self.bench.idle() is not None  # had another been sent, it would be answered
        assert self._count - self._before == times
        self._before += times

    @property
    def _count(self) -> int:
        return self.worker._calls.seconds.get("claim", Tally(())).count

    async def warm(self, *shards: int) -> None:
        """The worker is idle on these shards, and what it did so far does not count."""
        for shard in shards:
            await self.ended(await self.task(shard=shard))
        for shard in shards:
            await eventually(lambda at=shard: self.stands(at), what="its place there")
        assert await self.bench.idle() is not None
        self._before = self._count

    async def load(self, shard: int = 0) -> int | None:
        """The number of tasks with which it stands among a shard's workers with free slots."""
        score = await self.bench.client.zscore(Keys(shard).idle("m"), self.worker.id)
        return None if score is None else int(score) % CALLED

    async def stands(self, shard: int) -> bool:
        """Whether it stands there as one that runs nothing."""
        return await self.load(shard) == 0

    async def task(self, *, tokens: int = 2, delay_s: float = 0, shard: int = 0) -> str:
        directive = f'@fake {{\\"tokens\\": {tokens}, \\"delay_s\\": {delay_s}}}'
        request = f'{{"model": "m", "prompt": "{directive}"}}'
        return await self.bench.task(task_id=new_task_id(shard), request=request.encode())

    async def misses_a_task(self) -> str:
        """One that is sent to it and does not arrive."""
        (control,) = self.worker._controls
        control._handlers[SHARD.run(self.worker.id).encode()] = lambda payload: None
        task_id = await self.task()
        assert await self.bench.state(task_id) == "running"
        assert await self.bench.idle() is not None  # it has been sent
        return task_id

    async def ended(self, task_id: str, state: str = "completed") -> None:
        """Return once a task has ended and the worker knows of it."""

        async def over() -> bool:
            return await self.bench.state(task_id) == state

        await eventually(over, what="the task's end")
        await until(lambda: all(job.task_id != task_id for job in self.worker._jobs()))


@asynccontextmanager
async def one_worker(url: str, scripts: Scripts, **changes: int) -> AsyncIterator[OneWorker]:
    settings = Settings(
        redis_url=url, engine="fake", model="m", lease_s=NEVER_S, drain_s=5, **changes
    )
    shutdown = Shutdown()
    worker = Worker(settings, shutdown)
    running = asyncio.create_task(worker.run())
    try:
        one = OneWorker(worker, Bench(scripts))
        await until(lambda: worker._controls and all(item.opened for item in worker._controls))
        yield one
        shutdown.begin()
        assert await running == 0
    finally:
        await cancel_until_done([running])


@pytest.fixture(autouse=True)
def no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "POLL_MOST_S", NEVER_S)


async def test_a_worker_with_room_need_not_claim(redis_url: str, scripts: Scripts) -> None:
    async with one_worker(redis_url, scripts, max_concurrent=2) as one:
        await one.claimed(2)  # when it began, and when its channel was open
        for _ in range(5):
            await one.ended(await one.task())
        await one.claimed(0)  # each was started as it was submitted
        stopped = await one.task(delay_s=NEVER_S)
        await until(one.worker._jobs)
        await one.bench.stop(stopped)
        await one.ended(stopped, "cancelled")
        assert await one.stands(0)
        await one.ended(await one.task())  # it was called and has not shown itself: a bell
        await one.claimed(1)


async def test_a_full_worker_lets_go_of_what_it_is_sent(redis_url: str, scripts: Scripts) -> None:
    """A claim that was under way has filled it."""
    async with one_worker(redis_url, scripts, max_concurrent=1) as one:
        await one.claimed(2)
        first = await one.task(delay_s=NEVER_S)
        await until(one.worker._jobs)
        await one.bench.client.zadd(SHARD.idle("m"), {one.worker.id: 2 / 4096})
        second = await one.task()

        async def let_go() -> bool:
            return (await scripts.task_fields(SHARD, second))["worker"] == ""

        await eventually(let_go, what="the second task to be let go")
        assert [job.task_id for job in one.worker._jobs()] == [first]
        assert await one.bench.idle() == {}
        (claim,) = await one.bench.claim("other")
        assert (claim.task_id, claim.attempt, claim.handed_over) == (second, 2, True)
        await one.claimed(0)
        await one.bench.stop(first)
        await eventually(lambda: one.stands(0), what="its place there")
        await one.bench.stop(second)


async def test_what_it_was_not_told_is_found_once_it_listens_again(
    redis_url: str, scripts: Scripts
) -> None:
    async with one_worker(redis_url, scripts) as one:
        await one.claimed(2)
        missed = await one.misses_a_task()
        one.worker._controls[0].drop()
        await one.ended(missed)
        assert (await scripts.task_fields(SHARD, missed))["attempt"] == "1"


async def test_what_it_was_not_told_is_let_go_as_it_drains(
    redis_url: str, scripts: Scripts
) -> None:
    async with one_worker(redis_url, scripts) as one:
        await one.claimed(2)
        missed = await one.misses_a_task()
    (claim,) = await one.bench.claim("other")
    assert (claim.task_id, claim.attempt, claim.handed_over) == (missed, 2, True)
    assert (await scripts.task_fields(SHARD, missed)).get("lost") is None


async def test_a_full_worker_takes_the_next_as_a_slot_gets_free(
    redis_url: str, scripts: Scripts
) -> None:
    async with one_worker(redis_url, scripts, max_concurrent=1) as one:
        await one.claimed(2)
        first = await one.task(delay_s=NEVER_S)
        await until(one.worker._jobs)
        second = await one.task(delay_s=NEVER_S)
        assert await one.bench.idle() == {}
        await one.bench.stop(first)
        await until(lambda: [job.task_id for job in one.worker._jobs()] == [second])
        await one.claimed(2)
        await one.bench.stop(second)
        await one.ended(second, "cancelled")
        await one.claimed(1)
        assert await one.stands(0)


async def test_bells_do_not_put_off_what_a_frozen_worker_should_have_taken(
    redis_url: str, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Levelling leaves it half of what waits, for as long as its connection lives."""
    monkeypatch.setattr(consumer, "POLL_MOST_S", 0.3)
    async with (
        open_subscriber(redis_url, SHARD.tag) as listening,
        one_worker(redis_url, scripts, max_concurrent=8) as one,
    ):
        await listening.pubsub().ssubscribe(SHARD.control("frozen"))
        assert await one.bench.claim("frozen", free=16) == []
        for _ in range(4):
            await one.task(delay_s=NEVER_S)

        async def ring() -> bool:
            await scripts.publish(SHARD.control(one.worker.id), b"new")
            return len(one.worker._jobs()) == 4

        await eventually(ring, what="all four to run")


async def test_a_bell_is_answered_on_its_shard_alone(redis_url: str, scripts: Scripts) -> None:
    async with one_worker(redis_url, scripts, shards=3) as one:
        await one.warm(0, 1, 2)
        for shard in (1, 1, 0, 2, 1):
            await one.ended(await one.task(shard=shard))
        await one.claimed(5)


@pytest.mark.parametrize("word", [b"new", b"released"])
async def test_a_worker_that_another_shard_has_filled_passes_its_bells_on(
    redis_url: str, scripts: Scripts, word: bytes
) -> None:
    other = Keys(1)
    async with (
        open_subscriber(redis_url, other.tag) as listening,
        one_worker(redis_url, scripts, shards=2, max_concurrent=1) as one,
    ):
        await one.warm(0, 1)
        pubsub = listening.pubsub()
        await pubsub.ssubscribe(other.control("with-room"))
        first = await one.task(delay_s=NEVER_S)
        await until(one.worker._jobs)
        await one.claimed(1)
        assert await one.stands(1)  # nobody has told it
        await one.bench.client.zadd(other.idle("m"), {"with-room": 5})
        if word == b"new":
            second = await one.task(shard=1)
        else:
            await scripts.publish(other.control(one.worker.id), word)
        heard = None
        while heard is None:
            heard = await pubsub.get_message(ignore_subscribe_messages=True, timeout=5)
        assert heard["data"] == word
        assert await one.bench.client.zrange(other.idle("m"), 0, -1) == [b"with-room"]
        await one.claimed(1)
        await one.bench.stop(first)
        if word == b"new":  # the other has not come for it
            await one.ended(second)
        await one.ended(first, "cancelled")
        await eventually(lambda: one.stands(1), what="its place there")


async def test_each_of_several_shards_learns_that_a_task_has_left(
    redis_url: str, scripts: Scripts
) -> None:
    async with one_worker(redis_url, scripts, shards=2) as one:

        async def nothing_runs() -> bool:
            return await one.stands(0) and await one.stands(1)

        for _ in range(2):  # it begins with another shard each time
            task = await one.task(delay_s=NEVER_S)
            await until(one.worker._jobs)
            await one.bench.stop(task)
            await eventually(nothing_runs, what="the number in both shards")


async def test_shards_take_turns_at_the_slots_of_a_worker_that_is_never_idle(
    redis_url: str, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of one, be it of a lost worker, does not wait for all those of another."""
    monkeypatch.setattr(consumer, "POLL_MOST_S", 0.01)  # it looks in vain many times a task
    started: dict[str, int] = {}
    async with one_worker(redis_url, scripts, max_concurrent=1, shards=2) as one:
        first = await one.task(delay_s=NEVER_S)
        await until(one.worker._jobs)
        waiting = [await one.task(shard=shard, delay_s=0.05) for shard in (0, 1) for _ in range(4)]
        await one.bench.stop(first)
        for task_id in waiting:
            await one.ended(task_id)
            fields = await scripts.task_fields(Keys(int(task_id[1])), task_id)
            started[task_id] = int(fields["started"])
    order = "".join(task_id[1] for task_id in sorted(started, key=started.__getitem__))
    assert order in {"01010101", "10101010"}
