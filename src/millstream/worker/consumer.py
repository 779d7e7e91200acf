"""Runs what is sent to it, and claims while slots are free: never more than can start at once."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence

from millstream.shared.connection import RedisError, is_transient
from millstream.shared.keys import Keys
from millstream.shared.registry import heartbeat_interval
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings
from millstream.shared.steps import Claim
from millstream.worker.runner import Runner

logger = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_MOST_S = 0.1, 2.0
ASK_AGAIN_S = 0.5
POLL_MOST_S = 1.0  # bounds what a lost bell costs
HOLD_LEASES = 0.5  # two renewals: one may meet a connection that is not yet made again


class Consumer:
    """The loop that claims: it waits for a bell, a free slot or the poll, whatever comes first.

    A bell is answered on the shard that rang. What the others know of this worker is as old as the
    last look: one that rings it in vain is told, and rings the next.

    Args:
        scripts: The atomic steps; no call is sent twice.
        runner: Runs what was claimed.
        settings: The worker's.
        worker_id: Who claims.
        on_surplus: Told of tasks that are ours and for which there is no room.
    """

    def __init__(
        self,
        scripts: Scripts,
        runner: Runner,
        settings: Settings,
        *,
        worker_id: str,
        on_surplus: Callable[[list[Claim]], None],
    ) -> None:
        self._scripts = scripts
        self._runner = runner
        self._settings = settings
        self._worker_id = worker_id
        self._on_surplus = on_surplus
        self._bell = asyncio.Event()
        self._look_at = 0.0
        self._stopping = False
        self._shards = [_Shard(Keys(shard)) for shard in range(settings.shards)]
        self._turns = list(self._shards)

    def ring(self, shard: int, sweep: bool = True) -> None:
        """A shard may have work; with `sweep`, work that another worker has let go."""
        self._ring(self._shards[shard], sweep=sweep)

    def listens(self, shard: int) -> None:
        """We hear of a shard's tasks now: look for what was said while nobody listened."""
        self._shards[shard].missed = True
        self._ring(self._shards[shard])

    def _ring(self, shard: "_Shard", *, sweep: bool = False) -> None:
        shard.rung = True
        shard.sweep |= sweep
        self._bell.set()

    def sent(self, shard: int, claim: Claim) -> None:
        """A task was started for us as it was submitted."""
        if not self._stopping:  # else it is let go with all that we have
            self._start(self._shards[shard], [claim])

    def _start(self, shard: "_Shard", claims: Sequence[Claim]) -> None:
        """Run what is ours, as far as there is room: slots may have been taken on the way here."""
        surplus: list[Claim] = []
        for claim in claims:
            known = self._runner.find(claim.task_id, claim.attempt)
            if known or self._runner.running < self._settings.max_concurrent:
                self._runner.start(claim)
            else:
                surplus.append(claim)
        if surplus:
            self._on_surplus(surplus)
            shard.standing = shard.settled = False  # who lets tasks go is given no others

    def left(self) -> None:
        """A job has left: claim where we are not rung for what comes now.

        The script that ended it has told its own shard that we run one less.
        """
        for shard in self._shards:
            if shard.sweep or not shard.settled:
                self._ring(shard)

    def stop(self) -> None:
        """Claim nothing more. A claim under way is let finish: its tasks would hang on us."""
        self._stopping = True
        self._bell.set()

    async def run(self) -> None:
        """Claim until stopped."""
        while not self._stopping:
            await self._go_round()
            now = time.monotonic()
            moments = [self._look_at, *(shard.retry_at for shard in self._shards)]
            left = [moment - now for moment in moments if moment > now]
            await self._pause(min(left, default=self._poll()))

    def _poll(self) -> float:
        poll = min(POLL_MOST_S, heartbeat_interval(self._settings.lease_s))
        return poll * random.uniform(0.75, 1.25)  # noqa: S311 - workers must not move in step

    async def _pause(self, seconds: float) -> None:
        """Wait for a bell, so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._bell.wait()
        self._bell.clear()

    async def _go_round(self) -> None:
        """Claim once from each shard that has rung; once a poll, from all."""
        now = time.monotonic()
        # Bells do not put it off: a busy fleet has dead workers too, and some that are rung and do
        # not come. Where no slot is free it is still due once one is: others may have none either.
        look = now >= self._look_at
        looked = look
        for shard in [shard for shard in self._turns if look or shard.rung]:
            if self._stopping:
                return
            free = self._settings.max_concurrent - self._runner.running
            if free <= 0:
                looked = False
                if shard.recover or not (shard.rung and shard.standing):
                    continue
            if shard.retry_at > now:
                continue
            # Who was asked is asked again after all others: the tasks of one shard would have all
            # the slots of a worker that is never idle.
            self._turns.remove(shard)
            self._turns.append(shard)
            try:
                # One that was away must not hold up the others each time it is asked again.
                async with asyncio.timeout(ASK_AGAIN_S if shard.recover else None):
                    await self._claim(shard, free=max(0, free), look=look)
            except (RedisError, TimeoutError) as error:
                if not is_transient(error):
                    logger.error("claim was refused: %s", error)
                shard.failed()
            else:
                shard.answered(hold_s=self._settings.lease_s * HOLD_LEASES)
        if looked:
            self._look_at = now + self._poll()

    async def _claim(self, shard: "_Shard", *, free: int, look: bool) -> None:
        settings, running = self._settings, self._runner.running
        due = look or shard.sweep
        sweep = due and not shard.held(time.monotonic())
        shard.sweep = due and not (sweep and free)
        shard.rung, shard.standing, shard.settled = False, True, False
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
            recover=shard.recover or shard.missed,
            rung=not look,
            sendable=settings.shards == 1,  # of several, each would give it the same slots
        )
        shard.missed = False
        shard.standing = len(claims) < free
        shard.settled = shard.standing and waiting == 0
        self._start(shard, claims)
        if look and claims and waiting:
            self._ring(shard)


class _Shard:
    """How one shard has answered: one whose node is away is left alone for a while."""

    def __init__(self, shard: Keys) -> None:
        self.keys = shard
        self.rung = False
        """It has rung since it was asked last, or is to be asked for another reason."""
        self.sweep = False
        """What other workers have lost or let go is to be looked for."""
        self.standing = True
        """We may stand among its workers with free slots, and be rung."""
        self.settled = False
        """We do, and it left nothing to others: we need not ask when a job leaves."""
        self.recover = False
        """An answer may have been lost on its way: look what is ours already."""
        self.missed = False
        """The same of a task that was started for us."""
        self.retry_at = 0.0
        self._delay = RETRY_FIRST_S
        self._hold_until = 0.0

    def held(self, now: float) -> bool:
        """Whether nobody is to be replaced.

        After an outage every lease may have lapsed, and not one worker died: all renew first.
        """
        return self.recover or now < self._hold_until

    def failed(self) -> None:
        self.rung = self.recover = True
        self.retry_at = time.monotonic() + self._delay
        self._delay = min(2 * self._delay, RETRY_MOST_S)

    def answered(self, *, hold_s: float) -> None:
        if self.recover:
            self._hold_until = time.monotonic() + hold_s
        self.recover = False
        self.retry_at = 0.0
        self._delay = RETRY_FIRST_S
