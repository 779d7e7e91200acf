"""The fleet that is tormented: as `millstream up` has it, each process with a link of its own."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import redis.asyncio

from millstream.fleet.chaos.client import MODEL
from millstream.fleet.chaos.link import Link
from millstream.fleet.embedded import EmbeddedValkey
from millstream.fleet.plan import ProcessSpec
from millstream.fleet.ports import choose_ports
from millstream.fleet.screen import Screen
from millstream.fleet.state_folder import StateFolder
from millstream.fleet.supervisor import Supervisor
from millstream.fleet.watch import watch
from millstream.shared.connection import RedisError, open_redis
from millstream.shared.errors import MillstreamError
from millstream.shared.keys import Keys
from millstream.shared.listener import PortTaken, url_of
from millstream.shared.registry import ApiInfo, WorkerInfo, read_apis, read_workers
from millstream.shared.schemas import shard_of
from millstream.shared.scripts import Scripts
from millstream.shared.settings import PREFIX, Settings

_HOST = "127.0.0.1"
_READY_WITHIN_S = 60.0
_ROSTER_S = 0.25
# A process that was killed is back at once: the run is short, and the fault was ours.
_LONGEST_WAIT_S = 0.5
# Below the ports that the kernel gives to connections, or one of those would sit on the port of a
# pod that is just being started again.
_FIRST_PORTS = range(18_000, 32_000, 50)


class FleetLog(Screen):
    """Takes all that the processes say into a file, and counts their lines by the second."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        super().__init__(stdout=self._file, stderr=self._file)
        self.rates: Counter[tuple[str, int]] = Counter()

    def child_line(self, name: str, line: str) -> None:
        """Note when, too: what a process prints itself need not say."""
        self.rates[name, int(time.monotonic())] += 1
        super().child_line(name, f"{time.strftime('%H:%M:%S')} {line}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the fleet, and its way to Redis."""

    supervisor: Supervisor
    link: Link

    @property
    def name(self) -> str:
        """Such as `worker-2`."""
        return self.supervisor.spec.name

    @property
    def kind(self) -> str:
        """`api` or `worker`."""
        return self.supervisor.spec.kind


class ChaosFleet:
    """The processes, started on entry and gone on exit; their state lies in `folder`."""

    def __init__(self, folder: Path, *, apis: int, workers: int, shards: int = 1) -> None:
        self.folder = folder
        self._state = StateFolder(folder / "state")
        self.log = FleetLog(folder / "fleet.log")
        # Made without looking at the environment: a run is the same on every machine.
        self.settings = Settings.model_construct(
            host=_HOST,
            engine="fake",
            model=MODEL,
            lease_s=3.0,
            max_attempts=3,
            drain_s=5.0,
            keepalive_s=1.0,
            max_concurrent=16,
            fake_tokens_per_s=50.0,
            shards=shards,
        )
        self.shards = [Keys(shard) for shard in range(shards)]
        self._apis, self._workers = apis, workers
        self._stack = AsyncExitStack()
        self._background: list[asyncio.Task[Any]] = []
        self.members: list[Member] = []
        self.urls: list[str] = []
        self.redis: redis.asyncio.Redis
        self.scripts: Scripts
        self.seen: dict[str, WorkerInfo] = {}
        """The last heartbeat of every worker there ever was, by its id."""
        self.live: list[WorkerInfo] = []
        """Those on the roster now."""
        self.pods: list[ApiInfo] = []

    async def __aenter__(self) -> "ChaosFleet":
        try:
            await self._start()
        except BaseException:
            await self._take_down()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        await self._take_down()

    def kin(self, kind: str) -> list[Member]:
        """The members of a kind."""
        return [member for member in self.members if member.kind == kind]

    def worker_id(self, member: Member) -> str | None:
        """Under which id the process that runs now is on the roster."""
        pid = member.supervisor.pid
        return next((info.id for info in self.live if info.pid == pid), None)

    async def database_pid(self) -> int:
        """The process id of the database.

        Raises:
            RedisError: it is away.
        """
        client: Any = self.redis
        return int((await client.info("server"))["process_id"])

    async def owners(self, task_ids: Sequence[str]) -> dict[str, tuple[str, int]]:
        """Who runs these tasks, and which attempt it is.

        Raises:
            RedisError: Redis is away.
        """
        client: Any = self.redis
        pipeline = client.pipeline(transaction=False)
        for task_id in task_ids:
            pipeline.hmget(Keys(shard_of(task_id) or 0).task(task_id), "worker", "attempt", "state")
        rows: list[list[bytes | None]] = await pipeline.execute()
        return {
            task_id: (worker.decode(), int(attempt))
            for task_id, (worker, attempt, state) in zip(task_ids, rows, strict=True)
            if worker and attempt and state == b"running"
        }

    def check(self) -> None:
        """Notice what keeps the fleet running and has failed itself.

        Raises:
            MillstreamError: a process cannot be started at all.
        """
        for task in self._background:
            if task.done():
                task.result()

    async def _start(self) -> None:
        self._state.claim()
        self._valkey = EmbeddedValkey(self._state, screen=self.log, verbose=True)
        await self._valkey.prepare()
        await self._valkey.start()
        self._spawn(self._valkey.run())
        self.redis = await self._stack.enter_async_context(open_redis(self._valkey.url))
        self.scripts = Scripts(self.redis)
        ports = _free_ports(self._apis)
        self.urls = [url_of(_HOST, port) for port in ports]
        for number, port in enumerate(ports):
            await self._add("api", number, port=port)
        for number in range(self._workers):
            await self._add("worker", number)
        ready = asyncio.Event()
        self._spawn(
            watch(
                self._valkey.url,
                supervisors=[member.supervisor for member in self.members],
                screen=self.log,
                lease_s=self.settings.lease_s,
                url=self.urls[0],
                models=[MODEL],
                announce=lambda _: ready.set(),
            )
        )
        self._spawn(self._look())
        deadline = time.monotonic() + _READY_WITHIN_S
        while not (ready.is_set() and all(item.supervisor.ready for item in self.members)):
            self.check()
            if time.monotonic() > deadline:
                raise MillstreamError(
                    f"the fleet was not ready after {_READY_WITHIN_S:g} s; what it said is in "
                    f"{self.folder / 'fleet.log'}"
                )
            await asyncio.sleep(_ROSTER_S)

    async def _add(self, kind: str, number: int, **settings: object) -> None:
        link = await self._stack.enter_async_context(
            Link(partial(asyncio.open_unix_connection, self._state.socket))
        )
        values = {**self.settings.model_dump(), **settings, "redis_url": link.url}
        # Every setting by name: neither the caller's environment nor a .env changes the fleet.
        environment = {PREFIX + name.upper(): str(value) for name, value in values.items()}
        supervisor = Supervisor(
            ProcessSpec(kind, number, environment),
            guard=self._valkey.guard,
            screen=self.log,
            verbose=True,
            longest_wait_s=_LONGEST_WAIT_S,
        )
        self.members.append(Member(supervisor, link))
        self._spawn(supervisor.run())

    async def _look(self) -> None:
        """Read the roster again and again, for what dead workers have counted goes with them."""
        while True:
            try:
                self.live = await read_workers(self.scripts, lease_s=self.settings.lease_s)
                self.pods = await read_apis(self.scripts, lease_s=self.settings.lease_s)
            except RedisError:
                self.live, self.pods = [], []
            self.seen |= {info.id: info for info in self.live}
            await asyncio.sleep(_ROSTER_S)

    def _spawn(self, work: Any) -> None:
        self._background.append(asyncio.create_task(work))

    async def _take_down(self) -> None:
        force = asyncio.Event()
        await asyncio.gather(
            *(
                member.supervisor.stop(drain_s=self.settings.drain_s, force=force)
                for member in self.members
            )
        )
        left = set(self._background)
        while left:
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=0.5)
        await self._stack.aclose()
        if hasattr(self, "_valkey"):
            await self._valkey.stop()
        self._state.close()
        self.log.close()


def _free_ports(count: int) -> list[int]:
    # Anywhere in the range: another run beside this one would take the port of a killed pod.
    for first in random.sample(_FIRST_PORTS, len(_FIRST_PORTS)):
        try:
            return choose_ports(_HOST, first, count)
        except PortTaken:
            continue
    raise MillstreamError(f"there are no {count} free ports from {_FIRST_PORTS.start} on")
