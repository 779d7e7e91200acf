"""Who is in the fleet: each process says so by heartbeats, and everyone can read the roster."""

import asyncio
from collections.abc import Sequence

import msgspec

from millstream.shared import keys
from millstream.shared.address import mask_password
from millstream.shared.connection import RedisError, is_transient, open_redis
from millstream.shared.redis_check import UnfitRedis, until_fit
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings
from millstream.shared.states import WorkerState

_RETRY_FIRST_S, _RETRY_MOST_S = 0.1, 2.0


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's heartbeat."""

    id: str
    pid: int
    host: str
    model: str
    engine: str
    state: WorkerState
    slots: int
    running: int = 0
    tokens_per_s: float = 0.0
    attempts_reclaimed: int = 0
    context_length: int = 0
    vocabulary: int = 0
    """Token ids that a caller may name are below it; 0: the worker looks at them itself."""
    numerics: str = ""
    note: str = ""
    """What a starting worker is doing."""
    started_at: float = 0.0
    """Unix time."""
    stale_refused: int = 0
    """Appends and renewals refused because a task had moved on or ended."""
    shards: int = 1
    suggested_sampling: dict[str, float] = {}
    """What the model's makers suggest to sample with, as `EngineInfo` has it."""


class ApiInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An API pod's heartbeat."""

    id: str
    pid: int
    host: str
    url: str
    streams: int = 0
    shards: int = 1


def heartbeat_interval(lease_s: float) -> float:
    """A quarter of the lease: three may be lost before anyone is missed."""
    return lease_s / 4


def heartbeat_ttl(lease_s: float) -> float:
    """A process silent for a lease is gone; a pod's roster must not outlive its tasks' leases."""
    return lease_s


_worker_decoder = msgspec.json.Decoder(WorkerInfo)
_api_decoder = msgspec.json.Decoder(ApiInfo)


async def read_workers(scripts: Scripts, *, lease_s: float) -> list[WorkerInfo]:
    """The workers that live, in order of their ids."""
    rows = await scripts.roster(keys.WORKERS, ttl_s=heartbeat_ttl(lease_s))
    return sorted((_worker_decoder.decode(row) for row in rows), key=lambda info: info.id)


async def read_apis(scripts: Scripts, *, lease_s: float) -> list[ApiInfo]:
    """The API pods that live, in order of their ids."""
    rows = await scripts.roster(keys.APIS, ttl_s=heartbeat_ttl(lease_s))
    return sorted((_api_decoder.decode(row) for row in rows), key=lambda info: info.id)


def has_ready_worker(workers: Sequence[WorkerInfo]) -> bool:
    """Whether any worker takes tasks now."""
    return any(worker.state == WorkerState.READY for worker in workers)


async def until_welcome(settings: Settings) -> None:
    """Return once Redis has been found fit, and its fleet one to join; waits for one that is away.

    Raises:
        UnfitRedis: tasks are not safe there, or would be in nobody's reach: a live process spreads
            its keys over another number of shards.
    """
    delay = _RETRY_FIRST_S
    while True:
        try:
            await until_fit(settings.redis_url)
            async with open_redis(settings.redis_url, pool_size=2) as client:
                return await _refuse_other_shards(Scripts(client), settings)
        except RedisError as error:
            if not is_transient(error):
                shown = mask_password(settings.redis_url)
                raise UnfitRedis(f"{shown}: {error}") from error
        await asyncio.sleep(delay)
        delay = min(2 * delay, _RETRY_MOST_S)


async def _refuse_other_shards(scripts: Scripts, settings: Settings) -> None:
    workers = await read_workers(scripts, lease_s=settings.lease_s)
    apis = await read_apis(scripts, lease_s=settings.lease_s)
    for member in (*workers, *apis):
        if member.shards != settings.shards:
            raise UnfitRedis(
                f"MILLSTREAM_SHARDS is {settings.shards} here and {member.shards} at {member.id}, "
                "which runs: set the same everywhere, and stop the whole fleet to change it"
            )
