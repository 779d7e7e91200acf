"""Watches the fleet's roster, and tells the person at the terminal how it does."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from millstream.fleet.readiness import Progress, summary
from millstream.fleet.screen import Screen
from millstream.fleet.supervisor import Supervisor
from millstream.shared.connection import is_transient, open_redis
from millstream.shared.registry import WorkerInfo, read_apis, read_workers
from millstream.shared.scripts import Scripts
from millstream.shared.states import WorkerState

_POLL_S = 0.25
# Once all are ready, the roster only tells that a process started again has become so.
_CALM_POLL_S = 1.0
_ANSWER_S = 2.0


async def forget_earlier_start(
    redis_url: str, *, models: Sequence[str], shards: int
) -> dict[str, int]:
    """Forget the processes of earlier starts, and their models but these, on the fleet's own Redis.

    There the fleet is all there is. A request for such a model would wait for a worker that does
    not come; and a process that was killed would be taken for a live one until its heartbeat ends.
    Models that tasks wait for are kept: how many tasks, by model.
    """
    async with open_redis(redis_url, pool_size=1) as client:
        return await Scripts(client).forget_fleet(keep_models=models, shards=shards)


async def watch(
    redis_url: str,
    *,
    supervisors: Sequence[Supervisor],
    screen: Screen,
    lease_s: float,
    url: str,
    models: Sequence[str],
    announce: Callable[[str], None],
) -> None:
    """Show what starting workers do; announce it when all models can be asked at `url`."""
    progress = Progress()
    announced = False
    async with open_redis(redis_url, pool_size=2) as client:
        scripts = Scripts(client)
        while True:
            workers = await _read_roster(scripts, supervisors, lease_s=lease_s)
            names = {
                item.pid: item.spec.name
                for item in supervisors
                if item.pid and item.spec.kind == "worker"
            }
            for state, line in progress.news(names, workers):
                if state != WorkerState.STARTING or not screen.moving:
                    screen.say(line)
            screen.working(summary(names, workers))
            ready = {item.model for item in workers if item.state == WorkerState.READY}
            if not announced and ready.issuperset(models) and await _takes_work(url):
                announced = True
                announce(models[0])
            calm = announced and all(item.ready for item in supervisors)
            await asyncio.sleep(_CALM_POLL_S if calm else _POLL_S)


async def _read_roster(
    scripts: Scripts, supervisors: Sequence[Supervisor], *, lease_s: float
) -> list[WorkerInfo]:
    """Our workers in the roster; also marks those of our processes that have become ready."""
    host = socket.gethostname()
    ours = {item.pid: item for item in supervisors if item.pid}
    try:
        apis = await read_apis(scripts, lease_s=lease_s)
        workers = await read_workers(scripts, lease_s=lease_s)
    except Exception as error:
        if is_transient(error):
            return []
        raise
    # On a given Redis, other machines may have processes of the same number.
    workers = [worker for worker in workers if worker.host == host and worker.pid in ours]
    for api in apis:
        if api.host == host and api.pid in ours:
            ours[api.pid].mark_ready()
    for worker in workers:
        if worker.state == WorkerState.READY:
            ours[worker.pid].mark_ready()
    return workers


async def _takes_work(url: str) -> bool:
    """Whether the pod says that it is ready."""
    parts = urlsplit(url)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                head = f"GET /ready HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
                writer.write(head.encode())
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    return False
