"""Keeps a worker's leases from a thread of its own, and says when it may no longer write.

The event loop may be late and the engine may hang; neither must be hidden by the other. So the
renewing thread has its own connection, looks at the engine's progress rather than at the process
being alive, and stops when a lease goes by without a step.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import redis

from millstream.shared.connection import TRANSIENT_ERRORS, is_transient
from millstream.shared.keys import WORKERS, Keys
from millstream.shared.registry import WorkerInfo, heartbeat_interval, heartbeat_ttl
from millstream.shared.schemas import to_json
from millstream.shared.scripts import LeaseScripts
from millstream.shared.settings import Settings
from millstream.shared.states import WorkerState
from millstream.worker.engines.base import EngineHealth
from millstream.worker.job import Job

logger = logging.getLogger(__name__)


class LeaseClock:
    """Until when this worker may write, by its own monotonic clock.

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
        client: A blocking client of its own.
        settings: The worker's.
        jobs: The jobs at this moment, callable from here.
        health: The engine's health, callable from here.
        describe: The worker's heartbeat, callable from here.
        on_lost: Called on the event loop with jobs that are no longer ours and why (STALE, ENDED).
        on_engine_failed: Called on the event loop, once, when the engine is dead or hangs.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        settings: Settings,
        jobs: Callable[[], list[Job]],
        health: Callable[[], EngineHealth],
        describe: Callable[[], WorkerInfo],
        on_lost: Callable[[list[tuple[Job, int]]], None],
        on_engine_failed: Callable[[str], None],
    ) -> None:
        super().__init__(name="lease", daemon=True)
        self._client = client
        self._scripts = LeaseScripts(client)
        self._settings = settings
        self._lease_s = settings.lease_s
        self._jobs = jobs
        self._health = health
        self._describe = describe
        self.clock = LeaseClock(settings.lease_s)
        self._on_lost = on_lost
        self._on_engine_failed = on_engine_failed
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Event()
        self._stopping = False
        self._steps = -1
        self._progress_at = time.monotonic()
        self._failed = False
        self._quiet_until = 0.0

    def beat_now(self) -> None:
        """Send the next heartbeat at once, for a change of state others should see."""
        self._wake.set()

    def close(self) -> None:
        """End the thread and take the worker off the roster, if Redis answers."""
        self._stopping = True
        self._wake.set()
        self.join(timeout=5)

    def run(self) -> None:
        """Beat every quarter of a lease until closed."""
        interval = heartbeat_interval(self._lease_s)
        due = time.monotonic()
        while not self._stopping:
            self._beat()
            due = max(due + interval, time.monotonic())
            self._wake.wait(due - time.monotonic())
            self._wake.clear()
        try:
            self._client.hdel(WORKERS, self._describe().id)
            self._client.close()
        except TRANSIENT_ERRORS:
            logger.debug("could not leave the roster; it forgets us after a lease")

    def _beat(self) -> None:
        sent_at = time.monotonic()
        if not self._failed and (reason := self._engine_fault(sent_at)):
            self._failed = True
            self._loop.call_soon_threadsafe(self._on_engine_failed, reason)
        try:
            if not self._failed:
                self._renew(sent_at)
            info = self._describe()
            self._scripts.heartbeat(
                WORKERS,
                member=info.id,
                json=to_json(info),
                ttl_s=heartbeat_ttl(self._lease_s),
                model=info.model if info.state == WorkerState.READY else "",
            )
        except redis.RedisError as error:
            self._client.connection_pool.disconnect()
            if sent_at >= self._quiet_until:  # one line a lease, not one a beat
                self._quiet_until = sent_at + self._lease_s
                level = logging.WARNING if is_transient(error) else logging.ERROR
                logger.log(level, "Redis does not answer the lease thread: %s", error)

    def _renew(self, sent_at: float) -> None:
        lost: list[tuple[Job, int]] = []
        shards: dict[int, list[Job]] = {}
        for job in self._jobs():
            shards.setdefault(job.shard, []).append(job)
        info = self._describe()
        for shard, jobs in shards.items():
            answers = self._scripts.renew(
                Keys(shard),
                worker=info.id,
                model=info.model,
                live_ttl_s=self._settings.live_ttl_s,
                result_ttl_s=self._settings.result_ttl_s,
                max_task_s=self._settings.max_task_s,
                tasks=[(job.task_id, job.attempt) for job in jobs],
            )
            lost += [pair for pair in zip(jobs, answers, strict=True) if pair[1] < 0]
        if not shards:
            self._scripts.ping()  # an idle worker's clock goes on too
        if lost:
            # Before the publisher may go on: what moved on meanwhile is not ours to write.
            self._loop.call_soon_threadsafe(self._on_lost, lost)
        self.clock.renewed(sent_at)

    def _engine_fault(self, now: float) -> str | None:
        health = self._health()
        if health.fatal is not None:
            return health.fatal
        if health.active == 0 or health.steps != self._steps:
            self._steps = health.steps
            self._progress_at = now
        elif now - self._progress_at >= self._lease_s:
            return f"no decode step for {self._lease_s:g} s with {health.active} tasks running"
        return None
