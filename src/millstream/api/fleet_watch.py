"""How the fleet does: one look serves everyone who watches this pod for a while."""

import asyncio
import time
from typing import Any

import msgspec

from millstream.shared.address import mask_password
from millstream.shared.keys import Keys
from millstream.shared.registry import WorkerInfo, read_apis, read_workers
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings

LOOK_S = 0.9  # watchers look once a second


class FleetWatch:
    """Gathers roster, queues and Redis' own figures."""

    def __init__(self, scripts: Scripts, settings: Settings) -> None:
        self._scripts = scripts
        self._settings = settings
        self._lock = asyncio.Lock()
        self._looked_at = 0.0
        self._view: dict[str, Any] = {}

    async def view(self) -> dict[str, Any]:
        """The body of `/fleet.json`, at most a second old.

        Raises:
            RedisError: Redis does not answer.
        """
        async with self._lock:
            if time.monotonic() - self._looked_at > LOOK_S:
                self._view = await self._look()
                self._looked_at = time.monotonic()
            return self._view

    async def _look(self) -> dict[str, Any]:
        lease_s = self._settings.lease_s
        workers = await read_workers(self._scripts, lease_s=lease_s)
        apis = await read_apis(self._scripts, lease_s=lease_s)
        names = {worker.model for worker in workers}
        models = [await self._model(name, workers) for name in sorted(names)]
        known = (await self._scripts.remembered_models()).keys() | self._settings.on_demand
        for name in sorted(known - names):
            model = await self._model(name, workers)
            if model["waiting"] or model["running"]:  # it waits for a worker to come
                models.append(model)
        return {
            "redis": await self._redis(),
            "apis": [msgspec.to_builtins(api) for api in apis],
            "workers": [msgspec.to_builtins(worker) for worker in workers],
            "models": models,
        }

    async def _model(self, name: str, workers: list[WorkerInfo]) -> dict[str, Any]:
        shards = range(self._settings.shards)
        views = [await self._scripts.waiting(Keys(shard), model=name) for shard in shards]
        return {
            "name": name,
            "waiting": sum(view.waiting for view in views),
            "running": sum(view.running for view in views),
            "oldest_wait_s": max(view.oldest_wait_s for view in views),
            "tokens_per_s": sum(item.tokens_per_s for item in workers if item.model == name),
        }

    async def _redis(self) -> dict[str, Any]:
        infos = (await self._scripts.infos()).values()
        return {
            "url": mask_password(self._settings.redis_url),
            "version": next(
                str(info.get("valkey_version", info["redis_version"])) for info in infos
            ),
            "used_memory": sum(int(info["used_memory"]) for info in infos),
        }
