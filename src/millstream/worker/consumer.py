"""Claims tasks while there are free slots, and never more than can start at once."""

import asyncio
import contextlib
import logging
import random
import time
from collections import deque

from millstream.shared.connection import RedisError, is_transient
from millstream.shared.keys import Keys
from millstream.shared.registry import heartbeat_interval
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings
from millstream.worker.runner import Runner

logger = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_MOST_S = 0.1, 2.0
ASK_AGAIN_S = 0.5
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
        self._rung = False
        self._stopping = False
        self._shards = [_Shard(Keys(shard)) for shard in range(settings.shards)]
        self._turns = deque(self._shards)

    def ring(self, sweep: bool = True) -> None:
        """There may be work; with `sweep`, work that another worker has let go."""
        self._sweep |= sweep
        self._rung = True
        self._bell.set()

    def left(self, shard: int) -> None:
        """A job of a shard has left: claim, unless we are rung as we should be for what comes now.

        The script that ended it has told its own shard that we run one less.
        """
        told = self._shards[shard]
        if told.listed is not None:
            told.listed -= 1
        if any(item.listed != self._runner.running for item in self._shards):
            self.ring(sweep=False)

    def stop(self) -> None:
        """Claim nothing more. A claim under way is let finish: its tasks would hang on us."""
        self._stopping = True
        self._bell.set()

    async def run(self) -> None:
        """Claim until stopped."""
        while not self._stopping:
            more = await self._go_round()
            if not more:
                now = time.monotonic()
                retries = [item.retry_at - now for item in self._shards if item.retry_at > now]
                await self._pause(min([self._poll(), *retries]))

    def _poll(self) -> float:
        poll = min(POLL_MOST_S, heartbeat_interval(self._settings.lease_s))
        return poll * random.uniform(0.75, 1.25)  # noqa: S311 - workers must not move in step

    async def _pause(self, seconds: float) -> None:
        """Wait for a bell, so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._bell.wait()
        self._bell.clear()

    async def _go_round(self) -> bool:
        """Claim from each shard once; True when more may be had at once."""
        now = time.monotonic()
        # Bells do not put the sweep off: a busy fleet has dead workers too.
        wanted = self._sweep or now >= self._sweep_at
        # Nor do they put off the look at what those should have taken who do not come.
        rung = self._rung and now < self._sweep_at
        # Where it has to wait it is still due.
        self._sweep = wanted and any(shard.held(now) for shard in self._shards)
        self._rung = False
        more = False
        for _ in self._shards:
            free = self._settings.max_concurrent - self._runner.running
            if free <= 0 or self._stopping:
                self._sweep = True  # once a slot is free: others may have had none either
                return False
            # Who was asked is asked again after all others: the tasks of one shard would have all
            # the slots of a worker that is never idle.
            shard = self._turns[0]
            self._turns.rotate(-1)
            if shard.retry_at > now:
                continue
            try:
                # One that was away must not hold up the others each time it is asked again.
                async with asyncio.timeout(ASK_AGAIN_S if shard.recover else None):
                    more |= await self._claim(
                        shard, free=free, sweep=wanted and not shard.held(now), rung=rung
                    )
            except (RedisError, TimeoutError) as error:
                if not is_transient(error):
                    logger.error("claim was refused: %s", error)
                shard.failed()
            else:
                shard.answered(hold_s=self._settings.lease_s * HOLD_LEASES)
        if wanted:
            self._sweep_at = now + self._poll()
        return more

    async def _claim(self, shard: "_Shard", *, free: int, sweep: bool, rung: bool) -> bool:
        settings, running = self._settings, self._runner.running
        shard.listed = None
        claims, waiting = await self._scripts.claim(
            shard.keys,
            worker=self._worker_id,
            model=settings.model_name,
            free=free,
            running=running,
            lease_s=settings.lease_s,
            max_attempts=settings.max_attempts,
            live_ttl_s=settings.live_ttl_s,
            result_ttl_s=settings.result_ttl_s,
            max_task_s=settings.max_task_s,
            suspects=self._runner.suspects,
            sweep=sweep,
            recover=shard.recover,
            rung=rung,
        )
        for claim in claims:
            self._runner.start(claim)
        if len(claims) < free and waiting == 0:
            shard.listed = running + len(claims)
        return waiting > 0 and len(claims) > 0 and not rung


class _Shard:
    """How one shard has answered: one whose node is away is left alone for a while."""

    def __init__(self, shard: Keys) -> None:
        self.keys = shard
        self.recover = False
        """An answer may have been lost on its way: look what is ours already."""
        self.retry_at = 0.0
        self.listed: int | None = None
        """With how many jobs we stand among its workers with free slots, so that bells find us.

        None where we do not, or do not know, or left tasks there to others: who has room then asks.
        """
        self._delay = RETRY_FIRST_S
        self._hold_until = 0.0

    def held(self, now: float) -> bool:
        """Whether nobody is to be replaced.

        After an outage every lease may have lapsed, and not one worker died: all renew first.
        """
        return self.recover or now < self._hold_until

    def failed(self) -> None:
        self.recover = True
        self.retry_at = time.monotonic() + self._delay
        self._delay = min(2 * self._delay, RETRY_MOST_S)

    def answered(self, *, hold_s: float) -> None:
        if self.recover:
            self._hold_until = time.monotonic() + hold_s
        self.recover = False
        self.retry_at = 0.0
        self._delay = RETRY_FIRST_S
