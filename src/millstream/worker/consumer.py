"""Claims tasks while there are free slots, and never more than can start at once."""

import asyncio
import logging
import random
import time

from millstream.shared.connection import RedisError, is_transient
from millstream.shared.keys import Keys
from millstream.shared.registry import heartbeat_interval
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings
from millstream.worker.runner import Runner

logger = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_MOST_S = 0.1, 2.0
POLL_MOST_S = 1.0  # bounds what a lost bell costs
HOLD_LEASES = 0.5  # two renewals: one may meet a connection that is not yet made again


class Consumer:
    """The loop that claims: it waits for a bell, a free slot or the poll, whatever comes first."""

    def __init__(
        self, scripts: Scripts, runner: Runner, settings: Settings, *, worker_id: str
    ) -> None:
        self._scripts = scripts
        self._runner = runner
        self._settings = settings
        self._worker_id = worker_id
        self._bell = asyncio.Event()
        self._sweep = True
        self._sweep_at = 0.0
        self._recover = False
        self._away = False
        self._hold_until = 0.0
        self._rung = False
        self._stopping = False

    def ring(self, sweep: bool = True) -> None:
        """There may be work; with `sweep`, work that another worker has let go."""
        self._sweep |= sweep
        self._rung = True
        self._bell.set()

    def stop(self) -> None:
        """Claim nothing more. A claim under way is let finish: its tasks would hang on us."""
        self._stopping = True
        self._bell.set()

    async def run(self) -> None:
        """Claim until stopped."""
        delay = RETRY_FIRST_S
        while not self._stopping:
            try:
                more = await self._claim()
            except RedisError as error:
                if not is_transient(error):
                    logger.error("claim was refused: %s", error)
                # The answer may have been lost on its way: look what is ours already.
                self._recover = self._away = True
                await self._pause(delay)
                delay = min(2 * delay, RETRY_MOST_S)
                continue
            delay = RETRY_FIRST_S
            if not more:
                await self._pause(self._poll())

    def _poll(self) -> float:
        poll = min(POLL_MOST_S, heartbeat_interval(self._settings.lease_s))
        return poll * random.uniform(0.75, 1.25)  # noqa: S311 - workers must not move in step

    async def _pause(self, seconds: float) -> bool:
        """Wait for a bell; False when none came."""
        try:
            async with asyncio.timeout(seconds):
                await self._bell.wait()
        except TimeoutError:
            return False
        self._bell.clear()
        return True

    async def _claim(self) -> bool:
        """Go round the shards once; True when more may be had at once."""
        settings = self._settings
        now = time.monotonic()
        # After an outage every lease may have lapsed, and not one worker died: all renew first.
        held = self._away or now < self._hold_until
        # Bells do not put the sweep off: a busy fleet has dead workers too.
        sweep = not held and (self._sweep or now >= self._sweep_at)
        recover, rung = self._recover, self._rung
        self._sweep = self._sweep and not sweep
        self._recover = self._rung = False
        more = False
        for shard in range(settings.shards):
            free = settings.max_concurrent - self._runner.running
            if free <= 0 or self._stopping:
                self._sweep = True  # once a slot is free: others may have had none either
                return False
            claims, waiting = await self._scripts.claim(
                Keys(shard),
                worker=self._worker_id,
                model=settings.model_name,
                free=free,
                running=self._runner.running,
                lease_s=settings.lease_s,
                max_attempts=settings.max_attempts,
                live_ttl_s=settings.live_ttl_s,
                result_ttl_s=settings.result_ttl_s,
                max_task_s=settings.max_task_s,
                suspects=self._runner.suspects,
                sweep=sweep,
                recover=recover,
                rung=rung,
            )
            for claim in claims:
                self._runner.start(claim)
            more |= waiting > 0 and len(claims) > 0 and not rung
        if sweep:
            self._sweep_at = now + self._poll()
        if self._away:
            self._away = False
            self._hold_until = time.monotonic() + self._settings.lease_s * HOLD_LEASES
        return more
