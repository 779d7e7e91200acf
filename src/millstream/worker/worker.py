"""A worker: it owns one model, claims tasks, runs them, and hands them over when it must go."""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from millstream.shared.cancellation import cancel_until_done
from millstream.shared.connection import open_redis
from millstream.shared.content_filter import open_filters
from millstream.shared.keys import Keys
from millstream.shared.metrics.calls import CallStats
from millstream.shared.metrics.loop_lag import LoopLag
from millstream.shared.registry import WorkerInfo, until_welcome
from millstream.shared.schemas import shard_of
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings
from millstream.shared.states import WorkerState
from millstream.shared.steps import STALE, Claim
from millstream.shared.subscription import Subscription
from millstream.shared.tracing import open_tracing
from millstream.worker.consumer import Consumer
from millstream.worker.control import control_subscription, prove
from millstream.worker.engines.base import EngineHealth, EngineInfo, EngineSettings, StepOutput
from millstream.worker.engines.registry import create_engine
from millstream.worker.handover import Handover
from millstream.worker.job import Job, Limits
from millstream.worker.lease import LeaseKeeper
from millstream.worker.metrics import WorkerMetrics
from millstream.worker.publisher import Publisher
from millstream.worker.runner import Runner
from millstream.worker.shutdown import Shutdown
from millstream.worker.stopped import Stop, Stopped
from millstream.worker.traces import AttemptTraces

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # a Redis that is there has answered by then
_NOT_LOADED = EngineHealth(active=0, steps=0)


class Worker:
    """One worker process."""

    def __init__(self, settings: Settings, shutdown: Shutdown) -> None:
        self._settings = settings
        self._shutdown = shutdown
        # Unique to this process: a restarted worker is another consumer, and never mistaken for
        # the one whose tasks are being taken over.
        self.id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._state = WorkerState.STARTING
        self._note = ""
        self._started_at = time.time()
        self._filters = open_filters(settings)
        self._engine = create_engine(
            settings.engine,
            EngineSettings(
                model=settings.model_name,
                source=settings.model_source,
                device=settings.device,
                dtype=settings.dtype,
                max_concurrent=settings.max_concurrent,
                trust_remote_code=settings.trust_remote_code,
                fake_tokens_per_s=settings.fake_tokens_per_s,
                on_progress=self._set_note,
            ),
        )
        self.metrics = WorkerMetrics()
        self._traces = AttemptTraces(None, self.id)
        self._calls = CallStats()
        self._lag = LoopLag()
        self._controls: list[Subscription] = []
        self._info: EngineInfo | None = None
        self._runner: Runner | None = None
        self._stopped: Stopped | None = None
        self._publishers: list[Publisher] = []
        """One per shard."""
        self._stale_refused = 0
        self._releasing: set[str] = set()
        """Requests that we are letting go: that they are ours no more is no loss."""
        self._rate_at = (time.monotonic(), 0)
        self._tokens_per_s = 0.0
        self._engine_fault: str | None = None

    async def run(self) -> int:
        """Work until told to stop; the process's exit code: 0 drained, 1 the engine failed.

        Raises:
            SettingsError: the model cannot be loaded as set.
            UnfitRedis: tasks are not safe in this Redis, or its fleet has other shards.
            PortTaken: another program has the port of the metrics.
        """
        async with AsyncExitStack() as stack:
            tracing = await stack.enter_async_context(open_tracing("worker", self.id))
            self._traces = AttemptTraces(tracing, self.id)
            if self._settings.metrics_port:
                await self._serve_metrics(stack)
            checking = asyncio.create_task(until_welcome(self._settings), name="check redis")
            stack.push_async_callback(cancel_until_done, [checking])
            # Before anything is loaded, if Redis answers; else while it is.
            await asyncio.wait({checking}, timeout=_LOOK_S)
            if checking.done():
                checking.result()
            client = await stack.enter_async_context(open_redis(self._settings.redis_url))
            lease = self._start_lease()
            stack.push_async_callback(asyncio.to_thread, lease.close)
            loading = asyncio.create_task(self._engine.start(self._on_step), name="load model")
            if not await self._shutdown.first(loading):
                return 0  # the process's end frees the half-loaded model
            self._info = loading.result()
            stack.push_async_callback(self._stop_engine)
            if not await self._shutdown.first(checking):
                return 0
            checking.result()
            claims = await stack.enter_async_context(
                open_redis(self._settings.redis_url, pool_size=2, retries=0)
            )
            await self._work(
                Scripts(client, self._calls), Scripts(claims, self._calls), lease, self._info
            )
        return 0 if self._engine_fault is None else 1

    async def _serve_metrics(self, stack: AsyncExitStack) -> None:
        """From the beginning, so that a model that loads for long is seen to."""
        from millstream.worker.metrics_server import WorkerFamilies, serve_metrics

        families = WorkerFamilies(
            self.metrics,
            describe=self._describe,
            jobs=self._jobs,
            cache_tokens=lambda: self._info.cache_tokens if self._info else 0,
            calls=self._calls,
            lag=self._lag,
            reconnects=lambda: sum(max(0, item.opened - 1) for item in self._controls),
        )
        serve_metrics(families, host=self._settings.host, port=self._settings.metrics_port)
        measuring = asyncio.create_task(self._lag.run(), name="loop lag")
        stack.push_async_callback(cancel_until_done, [measuring])

    def _start_lease(self) -> LeaseKeeper:
        """Begin to beat before the model is loaded: the fleet sees that a worker is coming."""
        lease = LeaseKeeper(
            settings=self._settings,
            jobs=self._jobs,
            health=self._health,
            describe=self._describe,
            calls=self._calls,
            on_lost=self._on_lost,
            on_engine_failed=self._on_engine_failed,
            on_drain=self._on_drain,
        )
        lease.start()
        return lease

    async def _work(
        self, scripts: Scripts, claims: Scripts, lease: LeaseKeeper, info: EngineInfo
    ) -> None:
        """Claim, run and publish until told to stop, then hand over."""
        settings = self._settings
        handover = Handover(scripts, settings, worker_id=self.id)
        publishers = self._publishers = [
            Publisher(
                scripts,
                Keys(shard),
                worker_id=self.id,
                model=settings.model_name,
                result_ttl_s=settings.result_ttl_s,
                lease=clock,
                on_ended=self._ended,
                on_gone=self._drop,
            )
            for shard, clock in enumerate(lease.clocks)
        ]

        def on_unwritten(jobs: Sequence[Job]) -> None:
            if len(publishers) == 1:
                publishers[0].mark(jobs)
                return
            for job in jobs:
                publishers[job.shard].mark([job])

        def on_engine_error(job: Job, reason: str) -> None:
            self._give_back(handover, consumer, job, reason)

        def on_left() -> None:
            consumer.left()

        runner = self._runner = Runner(
            self._engine,
            Limits(info.context_length, settings.max_tokens_limit),
            self._filters,
            self.metrics,
            self._traces,
            on_unwritten=on_unwritten,
            on_engine_error=on_engine_error,
            on_left=on_left,
        )

        def on_surplus(surplus: list[Claim]) -> None:
            self._let_go(handover, surplus)

        consumer = Consumer(claims, runner, settings, worker_id=self.id, on_surplus=on_surplus)
        stopped = self._stopped = Stopped(scripts, result_ttl_s=settings.result_ttl_s)

        def on_stop(stop: Stop) -> None:
            if job := runner.find(stop.task_id, stop.attempt):
                self._drop(job)
            stopped.note(stop)

        def on_control_open(shard: int) -> None:
            stopped.doubt(shard)
            consumer.listens(shard)

        self._controls = [
            control_subscription(
                settings.redis_url,
                shard,
                worker_id=self.id,
                on_open=on_control_open,
                on_bell=consumer.ring,
                on_task=consumer.sent,
                on_stop=on_stop,
                on_drain=self._on_drain,
            )
            for shard in range(settings.shards)
        ]
        claiming = asyncio.create_task(consumer.run(), name="consumer")
        background = [
            claiming,
            asyncio.create_task(stopped.run(), name="stopped"),
            *(asyncio.create_task(item.run(), name="publisher") for item in publishers),
            *(asyncio.create_task(item.run(), name="control") for item in self._controls),
            asyncio.create_task(prove(self._controls, scripts), name="prove"),
        ]
        self._enter(WorkerState.READY, lease)
        logger.info("ready: %s on %s (%s)", settings.model_name, info.numerics, self.id)
        try:
            await self._shutdown.first(*background)
            failed = self._engine_fault is not None
            self._enter(WorkerState.STALLED if failed else WorkerState.DRAINING, lease)
            consumer.stop()
            async with asyncio.timeout(settings.drain_s):
                await claiming
                await self._hand_over(handover, runner)
        except TimeoutError:
            logger.warning("could not hand over in %g s; leases will lapse", settings.drain_s)
        finally:
            await cancel_until_done(background)
            runner.close()
        for task in background:
            if not task.cancelled() and (error := task.exception()):
                raise error

    def _enter(self, state: WorkerState, lease: LeaseKeeper) -> None:
        self._state = state
        self._note = ""
        lease.beat_now()

    async def _stop_engine(self) -> None:
        self._runner = None  # nobody is to take the engine's end for a fault
        await self._engine.stop()

    async def _hand_over(self, handover: Handover, runner: Runner) -> None:
        """Write what has been generated, then let another worker go on at once."""
        jobs = runner.halt()

        async def hand_over(shard: int, publisher: Publisher) -> int:
            await publisher.flushed()
            ours = [
                job for job in jobs if job.shard == shard and runner.find(job.task_id, job.attempt)
            ]
            self._releasing.update(job.request_id for job in ours)
            tasks = [(job.task_id, job.attempt) for job in ours]
            given = await handover.release(
                shard, tasks, blame=self._engine_fault or "", unheard=True
            )
            for job in ours:
                self._traces.ended(job, "handed_over")
            return given

        handed = await asyncio.gather(
            *(hand_over(shard, publisher) for shard, publisher in enumerate(self._publishers))
        )
        if any(handed):
            logger.info("handed %d tasks over", sum(handed))

    def _let_go(self, handover: Handover, claims: list[Claim]) -> None:
        """Have others run what we have no room for."""

        async def let_go(claim: Claim) -> None:
            shard = shard_of(claim.task_id) or 0
            await handover.release(shard, [(claim.task_id, claim.attempt)])

        for claim in claims:
            self._shutdown.keep(asyncio.create_task(let_go(claim), name=f"let go {claim.task_id}"))

    def _give_back(self, handover: Handover, consumer: Consumer, job: Job, reason: str) -> None:
        """The engine gave this task up and lives on: another attempt, here or elsewhere."""
        if (fatal := self._engine.health().fatal) is not None:
            self._on_engine_failed(fatal)  # the drain hands all tasks over
            return
        logger.warning("engine error: %s", reason, extra={"task_id": job.task_id})

        async def give() -> None:
            self._releasing.add(job.request_id)
            await handover.release(job.shard, [(job.task_id, job.attempt)], blame=reason)
            self._traces.ended(job, "handed_over")
            self._drop(job)
            consumer.ring(job.shard)

        task = asyncio.create_task(give(), name=f"give back {job.request_id}")
        self._shutdown.keep(task)

    def _on_step(self, outputs: list[StepOutput]) -> None:
        if self._runner is not None:
            self._runner.on_step(outputs)

    def _on_lost(self, lost: list[tuple[Job, int]]) -> None:
        for job, answer in lost:
            if job.request_id in self._releasing:
                continue
            known = self._runner and self._runner.find(job.task_id, job.attempt)
            if known is not None and answer == STALE:  # once a job
                self._stale_refused += 1
                where = {"task_id": job.task_id, "attempt": job.attempt}
                logger.warning("a task has moved on to another worker", extra=where)
            self._drop(job)

    def _ended(self, job: Job) -> None:
        self.metrics.finished(job)
        self._traces.ended(job, job.outcome)
        self._drop(job)

    def _drop(self, job: Job) -> None:
        self._releasing.discard(job.request_id)
        self._traces.ended(job, "left")
        if self._runner is not None:
            self._runner.drop(job)
        if self._stopped is not None:
            self._stopped.left(job.request_id, job.events)

    def _on_engine_failed(self, reason: str) -> None:
        if self._engine_fault is None:
            logger.error("the engine failed: %s", reason)
            self._engine_fault = reason
            self._shutdown.begin()

    def _on_drain(self) -> None:
        if not self._shutdown.begun:
            logger.info("told to drain by an administrator")
            self._shutdown.begin()

    def _jobs(self) -> list[Job]:
        return self._runner.jobs() if self._runner is not None else []

    def _health(self) -> EngineHealth:
        return self._engine.health() if self._runner is not None else _NOT_LOADED

    def _set_note(self, note: str) -> None:
        self._note = note

    def _describe(self) -> WorkerInfo:
        """The heartbeat; called from the lease thread."""
        now, tokens = time.monotonic(), self.metrics.generated_tokens
        then, before = self._rate_at
        if now - then >= 0.5:
            self._tokens_per_s = round((tokens - before) / (now - then), 2)
            self._rate_at = (now, tokens)
        return WorkerInfo(
            id=self.id,
            pid=os.getpid(),
            host=socket.gethostname(),
            model=self._settings.model_name,
            engine=self._settings.engine,
            state=self._state,
            slots=self._settings.max_concurrent,
            running=self._runner.running if self._runner else 0,
            tokens_per_s=self._tokens_per_s,
            attempts_reclaimed=self.metrics.reclaimed,
            context_length=self._info.context_length if self._info else 0,
            vocabulary=self._info.vocabulary_size if self._info else 0,
            numerics=self._info.numerics if self._info else "",
            suggested_sampling=dict(self._info.suggested_sampling) if self._info else {},
            note=self._note,
            started_at=self._started_at,
            shards=self._settings.shards,
            stale_refused=self._stale_refused + sum(p.stale_refused for p in self._publishers),
        )
