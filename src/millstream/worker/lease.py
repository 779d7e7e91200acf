"""Keeps a worker's leases from a thread of its own, and says when it may no longer write.

The event loop may be late and the engine may hang; neither must be hidden by the other. So the
renewing thread has its own connection, looks at the engine's progress rather than at the process
being alive, and stops when a lease goes by without a step. The thread has an event loop of its own,
in which a node of a cluster that is silent does not hold up the renewals on the others.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable

from millstream.shared.connection import RedisError, is_transient, open_redis
from millstream.shared.keys import WORKERS, Keys
from millstream.shared.metrics.calls import CallStats
from millstream.shared.registry import WorkerInfo, heartbeat_interval, heartbeat_ttl
from millstream.shared.schemas import to_json
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings
from millstream.shared.states import WorkerState
from millstream.worker.engines.base import EngineHealth
from millstream.worker.job import Job

logger = logging.getLogger(__name__)


BEAT_LEAST_S = 1.0  # what an answer may take at least, however short the lease


class LeaseClock:
    """Until when this worker may write to a shard, by its own monotonic clock.

    A renewal counts from the moment it was sent, and ends a margin early: so we stop before Redis,
    which counts from the moment it got the renewal, lets anyone take over.
    """

    def __init__(self, lease_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._span_s = lease_s * 0.9  # a tenth covers clocks that run at different speeds
        self._until = time.monotonic() + self._span_s
        self._renewed = asyncio.Event()

    def renewed(self, sent_at: float) -> None:
        """A renewal sent at this monotonic time has succeeded; called from the lease thread."""
        self._until = sent_at + self._span_s
        self._loop.call_soon_threadsafe(self._renewed.set)

    async def valid(self) -> None:
        """Return while we may write; once the lease has lapsed, wait for the next renewal."""
        while time.monotonic() >= self._until:
            self._renewed.clear()
            await self._renewed.wait()


class LeaseKeeper(threading.Thread):
    """The thread that renews, sends heartbeats and watches the engine.

    Args:
        settings: The worker's.
        jobs: The jobs at this moment, callable from here.
        health: The engine's health, callable from here.
        describe: The worker's heartbeat, callable from here.
        calls: Where calls to Redis are counted.
        on_lost: Called on the event loop with jobs that are no longer ours and why (STALE, ENDED).
        on_engine_failed: Called on the event loop, once, when the engine is dead or hangs.
        on_drain: Called on the event loop, maybe more than once, when the worker is to drain.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        jobs: Callable[[], list[Job]],
        health: Callable[[], EngineHealth],
        describe: Callable[[], WorkerInfo],
        calls: CallStats,
        on_lost: Callable[[list[tuple[Job, int]]], None],
        on_engine_failed: Callable[[str], None],
        on_drain: Callable[[], None],
    ) -> None:
        super().__init__(name="lease", daemon=True)
        self._settings = settings
        self._lease_s = settings.lease_s
        self._jobs = jobs
        self._health = health
        self._describe = describe
        self._calls = calls
        self.clocks = [LeaseClock(settings.lease_s) for _ in range(settings.shards)]
        self._on_lost = on_lost
        self._on_engine_failed = on_engine_failed
        self._on_drain = on_drain
        self._loop = asyncio.get_running_loop()
        self._own_loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._stopping = False
        self._steps = -1
        self._progress_at = self._looked_at = time.monotonic()
        self._failed = False
        self._quiet_until = 0.0

    def beat_now(self) -> None:
        """Send the next heartbeat at once, for a change of state others should see."""
        with contextlib.suppress(RuntimeError):  # the thread, and its loop with it, has ended
            self._own_loop.call_soon_threadsafe(self._wake.set)

    def close(self) -> None:
        """End the thread and take the worker off the roster, if Redis answers."""
        self._stopping = True
        self.beat_now()
        self.join(timeout=5)

    def run(self) -> None:
        """Beat every quarter of a lease until closed."""
        try:
            with asyncio.Runner(loop_factory=lambda: self._own_loop) as runner:
                runner.run(self._main())
        except Exception as error:  # nobody renews any more, so the worker has to end
            logger.exception("the lease thread failed")
            self._loop.call_soon_threadsafe(self._on_engine_failed, f"lease thread: {error}")

    async def _main(self) -> None:
        interval = heartbeat_interval(self._lease_s)
        async with open_redis(self._settings.redis_url) as client:
            scripts = Scripts(client, self._calls)
            due = time.monotonic()
            while not self._stopping:
                await self._beat(scripts)
                due = max(due + interval, time.monotonic())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(due - time.monotonic()):
                        await self._wake.wait()
                self._wake.clear()
            try:
                await scripts.leave(WORKERS, self._describe().id)
            except RedisError:
                logger.debug("could not leave the roster; it forgets us after a lease")

    async def _beat(self, scripts: Scripts) -> None:
        """Renew all leases and say that we live; a beat that takes a beat's time makes way."""
        sent_at = time.monotonic()
        if not self._failed and (reason := self._engine_fault(sent_at)):
            self._failed = True
            self._loop.call_soon_threadsafe(self._on_engine_failed, reason)
        calls = [self._heartbeat(scripts)]
        if not self._failed:
            calls += [self._renew(scripts, shard) for shard in range(self._settings.shards)]
        beats = [asyncio.create_task(call) for call in calls]
        _, late = await asyncio.wait(beats, timeout=max(BEAT_LEAST_S, self._lease_s / 2))
        for beat in late:
            beat.cancel()
        await asyncio.wait(beats)
        errors = [beat.exception() for beat in beats if not beat.cancelled()]
        for error in [error for error in errors if error is not None]:
            if not isinstance(error, RedisError):
                raise error
            self._complain(error, sent_at)
        if late:
            self._complain(TimeoutError("no answer"), sent_at)

    def _complain(self, error: Exception, now: float) -> None:
        if now >= self._quiet_until:  # one line a lease, not one a beat
            self._quiet_until = now + self._lease_s
            level = logging.WARNING if is_transient(error) else logging.ERROR
            if level == logging.WARNING and self._describe().state == WorkerState.STARTING:
                # Nothing is at stake yet; and it may be our own fault: reading torch from a disk
                # holds all threads up for seconds. Whoever waits for Redis says so.
                level = logging.DEBUG
            logger.log(level, "Redis does not answer the lease thread: %s", error)

    async def _heartbeat(self, scripts: Scripts) -> None:
        info = self._describe()
        to_drain = await scripts.heartbeat(
            WORKERS,
            member=info.id,
            json=to_json(info),
            ttl_s=heartbeat_ttl(self._lease_s),
            model=info.model if info.state == WorkerState.READY else "",
        )
        if to_drain:
            self._loop.call_soon_threadsafe(self._on_drain)

    async def _renew(self, scripts: Scripts, shard: int) -> None:
        """Renew what we run on a shard; with nothing there, an idle worker's clock goes on too."""
        sent_at = time.monotonic()
        jobs = [job for job in self._jobs() if job.shard == shard]
        info = self._describe()
        answers = await scripts.renew(
            Keys(shard),
            worker=info.id,
            model=info.model,
            live_ttl_s=self._settings.live_ttl_s,
            result_ttl_s=self._settings.result_ttl_s,
            tasks=[(job.task_id, job.attempt) for job in jobs],
        )
        if lost := [pair for pair in zip(jobs, answers, strict=True) if pair[1] < 0]:
            # Before the publisher may go on: what moved on meanwhile is not ours to write.
            self._loop.call_soon_threadsafe(self._on_lost, lost)
        self.clocks[shard].renewed(sent_at)

    def _engine_fault(self, now: float) -> str | None:
        health = self._health()
        if health.fatal is not None:
            return health.fatal
        # If we are late ourselves, the whole process was frozen: the engine gets its time anew.
        frozen = now - self._looked_at > self._lease_s / 2
        self._looked_at = now
        if health.active == 0 or health.steps != self._steps or frozen:
            self._steps = health.steps
            self._progress_at = now
        elif now - self._progress_at >= self._lease_s:
            return f"no decode step for {self._lease_s:g} s with {health.active} tasks running"
        return None
