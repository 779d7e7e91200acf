"""An API pod: the collaborators its routes share, and their lifetimes."""

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import HTTPConnection

from millstream.api.admission import Accepted, Admission
from millstream.api.auth.authenticator import Authenticator
from millstream.api.auth.tickets import Tickets
from millstream.api.deadlines import Deadlines
from millstream.api.departures import Departures
from millstream.api.directory import Directory
from millstream.api.feed import Feed
from millstream.api.fleet_watch import FleetWatch
from millstream.api.limiter import Limiter
from millstream.api.queue_watch import QueueWatch
from millstream.api.relay import Relay, missing_task, unavailable
from millstream.api.shown import Shown
from millstream.api.stream_slots import StreamSlots
from millstream.api.withdrawals import Withdrawals
from millstream.shared.cancellation import cancel_until_done
from millstream.shared.connection import RedisError, open_redis
from millstream.shared.content_filter import Filters
from millstream.shared.keys import APIS, Keys
from millstream.shared.limits import LimitStore
from millstream.shared.listener import public_url_of
from millstream.shared.metrics.calls import CallStats
from millstream.shared.metrics.loop_lag import LoopLag
from millstream.shared.redis_check import UnfitRedis
from millstream.shared.registry import (
    ApiInfo,
    heartbeat_interval,
    heartbeat_ttl,
    until_welcome,
)
from millstream.shared.schemas import Usage, shard_of, to_json
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings
from millstream.shared.states import TaskState
from millstream.shared.steps import StopAnswer

logger = logging.getLogger(__name__)

# How many logs are read at once, on connections of their own: a crowd that reads long logs takes
# turns at them, and submits, stops and all else stand in no line behind it.
LOG_READS = 8
CLOSING_LOOK_S = 1.0
CLOSING_MARGIN_S = 2.0  # for last words to be sent before the server cuts connections


class Pod:
    """What the routes of one pod share."""

    def __init__(
        self,
        settings: Settings,
        scripts: Scripts,
        log_reads: Scripts,
        authenticator: Authenticator,
        filters: Filters,
        *,
        calls: CallStats,
    ) -> None:
        self.settings = settings
        self.calls = calls
        self.lag = LoopLag()
        self.stops: Counter[str] = Counter(asked=0, left=0)
        """Tasks that this pod has stopped: `asked` to, or because the client had `left`."""
        self.authenticator = authenticator
        self.tickets = Tickets(scripts.runner)
        self.scripts = scripts
        self.id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.shown = Shown(scripts, result_ttl_s=settings.result_ttl_s)
        self.feed = Feed(
            settings.redis_url, scripts, self.shown, pod_id=self.id, shards=settings.shards
        )
        self.relay = Relay(log_reads, self.feed)
        self.directory = Directory(scripts, settings)
        store = LimitStore(scripts.runner, shards=settings.shards, lease_s=settings.lease_s)
        self.limiter = Limiter(store, settings)
        self.stream_slots = StreamSlots(store, lease_s=settings.lease_s)
        self.withdrawals = Withdrawals(scripts, result_ttl_s=settings.result_ttl_s)
        self.admission = Admission(
            scripts,
            self.withdrawals,
            self.directory,
            self.limiter,
            settings,
            feed=self.feed,
            input_filter=filters.input,
        )
        self.queue_watch = QueueWatch(scripts)
        self.departures = Departures(
            self.stop, self.feed, self.spawn, grace_s=settings.disconnect_grace_s
        )
        self.fleet_watch = FleetWatch(scripts, settings)
        self.closing = False
        """The pod has been told to go: streams that can be resumed elsewhere end now."""
        self.closed = False
        """The grace is over: every stream ends now."""
        self.unfit = False
        """Tasks are not safe in this Redis: the pod goes, and says so by its exit code."""
        self.loop = asyncio.get_running_loop()
        self._spawned: set[asyncio.Task[Any]] = set()

    def close_streams(self) -> None:
        """Begin to close: at once what another pod can go on with, the rest within the drain."""

        async def close_rest() -> None:
            deadline = self.loop.time() + self.settings.drain_s - CLOSING_MARGIN_S
            while self.loop.time() < deadline:
                await asyncio.sleep(CLOSING_LOOK_S)
                self.feed.wake_all()
            self.end_streams()

        if not self.closing:
            self.closing = True
            self.feed.wake_all()
            self._closing_task = asyncio.create_task(close_rest(), name="close streams")

    def end_streams(self) -> None:
        """The grace is over: last words to all."""
        self.closing = self.closed = True
        self.feed.wake_all()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run something that must go on when the request that wanted it is gone."""
        task = asyncio.create_task(work, name=name)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)

    async def settled(self) -> None:
        """Return when all that was spawned is done."""
        while self._spawned:
            await asyncio.gather(*self._spawned, return_exceptions=True)

    async def stop(
        self, task_id: str, caller: str, *, left: bool = False, for_now: bool = False
    ) -> tuple[TaskState, Usage]:
        """End a task; how it stands then.

        Args:
            task_id: Which.
            caller: Whose it must be.
            left: Nobody asked for it: the client went away.
            for_now: That client could come back, to any pod: the task goes on if others want it.

        Raises:
            UnknownTask: there is none, or it is another caller's.
            ExpiredTask: there was one.
            RedisUnavailable: Redis does not answer, so the stop is not certain.
        """
        shard = shard_of(task_id)
        answer = StopAnswer("unknown")
        if shard is not None:
            try:
                answer = await self.scripts.stop(
                    Keys(shard),
                    task_id=task_id,
                    caller=caller,
                    result_ttl_s=self.settings.result_ttl_s,
                    left_by=self.id if for_now else "",
                )
            except RedisError as error:
                raise unavailable(error) from error
        if answer.state in ("unknown", "expired"):
            raise missing_task(task_id, expired=answer.state == "expired")
        if answer.state == TaskState.CANCELLED:
            self.shown.note_stop(task_id, caller, tokens=answer.completion_tokens)
        self.stops["left" if left else "asked"] += answer.now
        return TaskState(answer.state), Usage(answer.prompt_tokens, answer.completion_tokens)

    def left(self, accepted: Accepted, caller: str, *, for_now: bool = False) -> None:
        """The client of an answer went away: end it, after the grace, if it was its alone."""
        if accepted.attached:
            for task_id in accepted.task_ids:
                self.departures.left(task_id, caller, for_now=for_now)

    async def check_store(self) -> None:
        """Leave if Redis, which was away when the pod started, comes up unfit, or not for us."""
        try:
            await until_welcome(self.settings)
        except UnfitRedis as error:
            logger.error("%s", error)
            self.unfit = True
            signal.raise_signal(signal.SIGTERM)

    def on_background_end(self, task: asyncio.Task[None]) -> None:
        """A pod that cannot listen or beat any more has to be started again."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)
            self.unfit = True
            signal.raise_signal(signal.SIGTERM)

    async def heartbeat(self, url: str) -> None:
        """Keep the pod on the roster."""
        while True:
            info = ApiInfo(
                id=self.id,
                pid=os.getpid(),
                host=socket.gethostname(),
                url=url,
                streams=self.feed.streams,
                shards=self.settings.shards,
            )
            try:
                await self.scripts.heartbeat(
                    APIS,
                    member=self.id,
                    json=to_json(info),
                    ttl_s=heartbeat_ttl(self.settings.lease_s),
                )
            except RedisError as error:
                logger.debug("heartbeat: %s", error)
            await asyncio.sleep(heartbeat_interval(self.settings.lease_s))


@asynccontextmanager
async def open_pod(
    settings: Settings, authenticator: Authenticator, filters: Filters
) -> AsyncGenerator[Pod]:
    """A pod with its connections and background tasks, for as long as the context lasts."""
    async with (
        open_redis(settings.redis_url) as client,
        open_redis(settings.redis_url, pool_size=LOG_READS) as reading,
    ):
        calls = CallStats()
        pod = Pod(
            settings,
            Scripts(client, calls),
            Scripts(reading, calls),
            authenticator,
            filters,
            calls=calls,
        )
        url = public_url_of(settings.host, settings.port)
        background = [
            asyncio.create_task(pod.feed.run(), name="feed"),
            asyncio.create_task(pod.feed.pulse(), name="pulse"),
            asyncio.create_task(pod.directory.load(), name="first roster"),
            asyncio.create_task(pod.heartbeat(url), name="heartbeat"),
            asyncio.create_task(pod.lag.run(), name="loop lag"),
            asyncio.create_task(pod.stream_slots.keep(), name="stream slots"),
            asyncio.create_task(pod.withdrawals.run(), name="withdrawals"),
            asyncio.create_task(pod.check_store(), name="check redis"),
            asyncio.create_task(authenticator.keyring.watch(), name="watch keys"),
            asyncio.create_task(Deadlines(pod.scripts, settings).run(), name="deadlines"),
        ]
        for task in background:
            task.add_done_callback(pod.on_background_end)
        try:
            yield pod
        finally:
            try:
                async with asyncio.timeout(CLOSING_MARGIN_S):
                    await cancel_until_done(background)
                async with asyncio.timeout(2):
                    await pod.settled()
                    await pod.scripts.leave(APIS, pod.id)
            except (RedisError, TimeoutError) as error:
                logger.debug("could not leave the roster: %s", error)


# Asynchronous, though it waits for nothing: FastAPI sends a plain function to a thread.
async def pod_of(connection: HTTPConnection) -> Pod:
    """The pod a request or a WebSocket came to (a FastAPI dependency)."""
    return connection.app.state.pod


CurrentPod = Annotated[Pod, Depends(pod_of)]
