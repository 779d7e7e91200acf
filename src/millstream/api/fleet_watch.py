"""How the fleet does: one look serves everyone who watches this pod for a while."""

import asyncio
import time
from typing import Any

import msgspec

from millstream.shared.address import mask_password
from millstream.shared.keys import Keys
from millstream.shared.queue_depth import QueueDepth
from millstream.shared.redis_check import Info, server_of
from millstream.shared.registry import ApiInfo, WorkerInfo, read_apis, read_workers
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings

LOOK_S = 0.9  # watchers look once a second


class FleetLook(msgspec.Struct, frozen=True):
    """What was seen of the fleet."""

    at: float
    """By the monotonic clock."""
    workers: list[WorkerInfo]
    apis: list[ApiInfo]
    queues: dict[str, QueueDepth]
    """Of all models that have a worker, or had one within the last week."""
    servers: list[Info]
    """What each Redis says of itself."""


class FleetWatch:
    """Gathers roster, queues and Redis' own figures."""

    def __init__(self, scripts: Scripts, settings: Settings) -> None:
        self._scripts = scripts
        self._settings = settings
        self._looking: asyncio.Task[FleetLook] | None = None
        self.last: FleetLook | None = None
        """The last look that came to its end."""

    async def look(self, *, within_s: float | None = None) -> FleetLook | None:
        """A look that is at most a second old; with `within_s` the last one, if it takes longer.

        Raises:
            RedisError: Redis does not answer, and there is no `within_s`.
        """
        if self.last is not None and time.monotonic() - self.last.at <= LOOK_S:
            return self.last
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="look at the fleet")
            self._looking.add_done_callback(self._looked)
        looking = self._looking
        if within_s is None:
            return await asyncio.shield(looking)
        await asyncio.wait({looking}, timeout=within_s)
        return self.last

    async def view(self) -> dict[str, Any]:
        """The body of `/fleet.json`, at most a second old.

        Raises:
            RedisError: Redis does not answer.
        """
        look = await self.look()
        assert look is not None  # noqa: S101 - there was no bound
        served = {worker.model for worker in look.workers}
        return {
            "redis": self._redis(look),
            "apis": [msgspec.to_builtins(api) for api in look.apis],
            "workers": [msgspec.to_builtins(worker) for worker in look.workers],
            "models": [
                {
                    "name": name,
                    "waiting": queue.waiting,
                    "running": queue.running,
                    "oldest_wait_s": queue.oldest_wait_s,
                    "tokens_per_s": sum(
                        worker.tokens_per_s for worker in look.workers if worker.model == name
                    ),
                }
                for name, queue in look.queues.items()
                # One without a worker, if something waits for one to come.
                if name in served or queue.waiting or queue.running
            ],
        }

    def _looked(self, looking: "asyncio.Task[FleetLook]") -> None:
        if not looking.cancelled() and looking.exception() is None:
            self.last = looking.result()

    async def _look(self) -> FleetLook:
        lease_s = self._settings.lease_s
        workers = await read_workers(self._scripts, lease_s=lease_s)
        apis = await read_apis(self._scripts, lease_s=lease_s)
        names = {worker.model for worker in workers} | await self._remembered()
        queues = {name: await self._depth(name) for name in sorted(names)}
        servers = [*(await self._scripts.infos()).values()]
        return FleetLook(time.monotonic(), workers, apis, queues, servers)

    async def _remembered(self) -> set[str]:
        """Models that may have no worker now."""
        names = {*await self._scripts.remembered_models()}
        return names | self._settings.on_demand | {self._settings.model} - {""}

    async def _depth(self, model: str) -> QueueDepth:
        shards = range(self._settings.shards)
        return QueueDepth.of_all(
            [await self._scripts.depth(Keys(shard), model=model) for shard in shards]
        )

    def _redis(self, look: FleetLook) -> dict[str, Any]:
        name, version = server_of(look.servers[0])
        return {
            "url": mask_password(self._settings.redis_url),
            "name": name,
            "version": version,
            "used_memory": sum(int(info["used_memory"]) for info in look.servers),
        }
