"""Writes what the jobs bring to their logs: one call for whatever has piled up on a shard.

While a call is under way the engine goes on; what it brings meanwhile goes into the next call. So a
slow Redis makes calls larger and never holds up a decode step.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from millstream.shared.connection import RedisError, is_transient
from millstream.shared.keys import Keys
from millstream.shared.scripts import Scripts
from millstream.shared.steps import STALE
from millstream.worker.job import Job
from millstream.worker.lease import LeaseClock

logger = logging.getLogger(__name__)

MOST_EVENTS_A_ROW = 256  # bounds one call after an outage, in which whole answers may pile up
RETRY_FIRST_S, RETRY_MOST_S = 0.05, 1.0


class Publisher:
    """The one writer of this worker's logs on a shard.

    Args:
        scripts: The atomic steps.
        shard: The shard.
        worker_id: Who writes.
        model: The model's name, as in the queue's.
        result_ttl_s: How long an ended task can be read.
        lease: Says whether we may still write.
        on_ended: Told of a job whose end is written.
        on_gone: Told of a job that is no longer ours.
    """

    def __init__(
        self,
        scripts: Scripts,
        shard: Keys,
        *,
        worker_id: str,
        model: str,
        result_ttl_s: int,
        lease: LeaseClock,
        on_ended: Callable[[Job], None],
        on_gone: Callable[[Job], None],
    ) -> None:
        self._scripts = scripts
        self._worker_id = worker_id
        self._shard = shard
        self._model = model
        self._result_ttl_s = result_ttl_s
        self._lease = lease
        self._on_ended = on_ended
        self._on_gone = on_gone
        self._dirty: dict[str, Job] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.stale_refused = 0
        """Rows refused because another attempt owns the task."""

    def mark(self, jobs: Sequence[Job]) -> None:
        """Have new events of jobs written."""
        if not self._dirty:
            self._idle.clear()
            self._wake.set()
        for job in jobs:
            self._dirty[job.request_id] = job

    async def flushed(self) -> None:
        """Return once nothing is left to write."""
        await self._idle.wait()

    async def run(self) -> None:
        """Write for ever; cancel to end, after `flushed`."""
        delay = RETRY_FIRST_S
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._lease.valid()
            batch, self._dirty = self._dirty, {}
            try:
                await self._write(list(batch.values()))
            except RedisError as error:
                if not is_transient(error):
                    logger.error("append was refused: %s", error)
                # What was written is not known: the same rows again, the script skips what it has.
                self._dirty = {**batch, **self._dirty}
                self._wake.set()
                await asyncio.sleep(delay)
                delay = min(2 * delay, RETRY_MOST_S)
            else:
                delay = RETRY_FIRST_S
                if not self._dirty:
                    self._idle.set()

    async def _write(self, jobs: list[Job]) -> None:
        rows = [job.row(MOST_EVENTS_A_ROW) for job in jobs]
        answers = await self._scripts.append(
            self._shard,
            worker=self._worker_id,
            model=self._model,
            result_ttl_s=self._result_ttl_s,
            rows=rows,
        )
        for job, answer in zip(jobs, answers, strict=True):
            if answer < 0:
                self.stale_refused += answer == STALE
                self._on_gone(job)
                continue
            job.written = answer
            if job.outcome and answer == job.ends_at:
                self._on_ended(job)
            elif job.unwritten:
                self.mark([job])
