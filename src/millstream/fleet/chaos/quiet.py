"""How the fleet is at rest: what is left that should not be, and how fast first tokens come."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import httpx2

from millstream.fleet.chaos.client import MODEL, Client
from millstream.fleet.chaos.history import Form, History
from millstream.fleet.chaos.load import Load
from millstream.fleet.chaos.local_fleet import ChaosFleet
from millstream.fleet.chaos.prompts import Prompt, make_canary
from millstream.shared.connection import RedisError
from millstream.shared.states import WorkerState

WITHIN_S = 30.0
"""How long after the last fault the fleet may take to come to rest."""

_POLL_S = 0.25
_ROUND = 4


async def settle(fleet: ChaosFleet, load: Load) -> tuple[float, list[str]]:
    """Wait for rest; how long that took, and what is left if it did not come."""
    begun_at = time.monotonic()
    unfinished = await load.finish(WITHIN_S)
    while left := await unrest(fleet, unfinished):
        if time.monotonic() - begun_at > WITHIN_S:
            break
        await asyncio.sleep(_POLL_S)
    return time.monotonic() - begun_at, left


async def unrest(fleet: ChaosFleet, unfinished: int) -> list[str]:
    """What is not at rest now."""
    try:
        return await _look(fleet, unfinished)
    except RedisError as error:
        return [f"Redis does not answer: {error}"]


async def _look(fleet: ChaosFleet, unfinished: int) -> list[str]:
    client: Any = fleet.redis
    left: list[str] = []
    if unfinished:
        left.append(f"{unfinished} clients have no answer")
    for shard in fleet.shards:
        view = await fleet.scripts.waiting(shard, model=MODEL)
        if view.waiting or view.running:
            left.append(f"{view.waiting} tasks wait and {view.running} run")
    ready = [info for info in fleet.live if info.state == WorkerState.READY]
    if len(ready) != len(fleet.kin("worker")):
        left.append(f"{len(ready)} workers are ready of {len(fleet.kin('worker'))}")
    running = sum(info.running for info in fleet.live)
    if running:
        left.append(f"workers say they run {running} tasks")
    if len(fleet.pods) != len(fleet.urls):
        left.append(f"{len(fleet.pods)} pods are on the roster of {len(fleet.urls)}")
    streams = sum(pod.streams for pod in fleet.pods)
    if streams:
        left.append(f"pods say they serve {streams} streams")
    channels = {name.decode() for name in await client.execute_command("PUBSUB", "SHARDCHANNELS")}
    known = {
        channel
        for shard in fleet.shards
        for info in fleet.live
        for channel in (shard.control(info.id), shard.run(info.id))
    }
    known |= {shard.pod(pod.id) for shard in fleet.shards for pod in fleet.pods}
    if channels != known:
        left.append(f"subscriptions: {sorted(channels ^ known)} are too many or missing")
    lasting = [key async for key in client.scan_iter(count=1000) if await client.ttl(key) == -1]
    if lasting:
        left.append(f"keys without a time to live: {lasting[:5]}")
    return left


async def unready_pods(urls: Sequence[str], http: httpx2.AsyncClient) -> list[str]:
    """The pods that do not say they are ready."""
    unready: list[str] = []
    for url in urls:
        try:
            if (await http.get(f"{url}/ready", timeout=5)).status_code != 200:
                unready.append(url)
        except httpx2.TransportError:
            unready.append(url)
    return unready


class Probe:
    """Asks small things of every pod, and takes the time until the first token."""

    def __init__(self, urls: Sequence[str], http: httpx2.AsyncClient) -> None:
        self._urls = urls
        self._http = http
        self._generator = random.Random(0)  # noqa: S311
        self.histories: list[History] = []

    async def slowest(self) -> float:
        """Seconds to the slowest first token of a round, one task after the other."""
        times: list[float] = []
        for url in self._urls:
            client = Client([url], self._http, self._generator, stopping=asyncio.Event())
            times += [await self._first_token(client) for _ in range(_ROUND)]
        return max(times)

    async def healed_after(self, baseline_s: float, within_s: float) -> float | None:
        """How long until a round is as fast as the baseline; None if none was in time.

        Twice as slow, and a quarter of a second, are the noise of a machine that others use too.
        """
        begun_at = time.monotonic()
        while await self.slowest() > 2 * baseline_s + 0.25:
            if time.monotonic() - begun_at > within_s:
                return None
        return time.monotonic() - begun_at

    async def _first_token(self, client: Client) -> float:
        canary = make_canary(self._generator)
        prompt = Prompt(f'@fake {{"tokens": 2}}\nTell me of {canary}.', canary, {})
        history = History(Form.NATIVE, prompt)
        self.histories.append(history)
        begun_at = time.monotonic()
        await client.run(history)
        seen = history.connections[0].seen if history.connections else []
        return (seen[0].at if seen else time.monotonic()) - begun_at
