"""API pods and workers as real processes on a real Valkey, for one test."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio
from tests.support.ports import free_port
from tests.support.waiting import eventually

from millstream.shared.connection import open_redis
from millstream.shared.keys import Keys
from millstream.shared.registry import WorkerInfo, read_workers
from millstream.shared.schemas import shard_of
from millstream.shared.scripts import Scripts
from millstream.shared.states import WorkerState

LEASE_S = 3.0


def clean_environment(**settings: object) -> dict[str, str]:
    """The environment of a child: ours without MILLSTREAM_ names, plus the given settings."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MILLSTREAM_")}
    for name, value in settings.items():
        environment[f"MILLSTREAM_{name.upper()}"] = str(value)
    return environment


class Process:
    """A child process with its log in a file."""

    def __init__(
        self, kind: str, log: Path, environment: dict[str, str], launcher: Sequence[str] = ()
    ) -> None:
        self.log = log
        with log.open("wb") as sink:
            self.popen = subprocess.Popen(
                [*launcher, sys.executable, "-m", "millstream", kind],
                env=environment,
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=log.parent,  # no .env of a developer's
                start_new_session=True,  # so that a launcher's child can be killed with it
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    async def ended(self, within_s: float = 10.0) -> int:
        """Wait for the end; the exit code."""

        async def look() -> bool:
            return self.popen.poll() is not None

        await eventually(look, within_s=within_s, what=f"end of {self.log.stem}")
        return self.popen.returncode

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait(10)

    def memory_mb(self, *, peak: bool = False) -> float:
        """Resident memory now, or the most there ever was."""
        name = "VmHWM" if peak else "VmRSS"
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024

    def text(self) -> str:
        return self.log.read_text(errors="replace")


class Api(Process):
    """An API pod."""

    def __init__(self, log: Path, environment: dict[str, str]) -> None:
        self.url = f"http://127.0.0.1:{environment['MILLSTREAM_PORT']}"
        super().__init__("api", log, environment)

    async def up(self) -> "Api":
        async with httpx.AsyncClient(base_url=self.url) as client:

            async def look() -> bool:
                assert self.popen.poll() is None, self.text()
                try:
                    return (await client.get("/health")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(look, within_s=20, what="API pod")
        return self


class LocalFleet:
    """Starts what a test asks for and leaves nothing behind."""

    def __init__(self, redis_url: str, folder: Path, **settings: object) -> None:
        self.redis_url = redis_url
        self.folder = folder
        self.settings: dict[str, object] = {
            "redis_url": redis_url,
            "shards": 1,  # tests look at keys by name, on a cluster too; test_cluster.py has more
            "engine": "fake",
            "lease_s": LEASE_S,
            "drain_s": 5,
            **settings,
        }
        self.processes: list[Process] = []
        self.source: Path | None = None
        """The `src` folder of another version, which processes that are started from now on run."""
        self.redis: redis.asyncio.Redis
        self.scripts: Scripts

    async def __aenter__(self) -> "LocalFleet":
        self._redis_context = open_redis(self.redis_url)
        self.redis = await self._redis_context.__aenter__()
        self.scripts = Scripts(self.redis)
        return self

    async def __aexit__(self, *rest: object) -> None:
        for process in self.processes:
            process.kill()
        await self._redis_context.__aexit__(None, None, None)

    def logs(self) -> str:
        """The last lines of each process, for a test that failed."""
        return "\n".join(
            f"--- {process.log.name}\n{process.text()[-3000:]}" for process in self.processes
        )

    def _log(self, kind: str) -> Path:
        return self.folder / f"{kind}-{len(self.processes)}.log"

    def _environment(self, overrides: dict[str, object]) -> dict[str, str]:
        environment = clean_environment(**{**self.settings, **overrides})
        return environment | ({"PYTHONPATH": str(self.source)} if self.source else {})

    @property
    def url(self) -> str:
        """The first pod's."""
        return next(process.url for process in self.processes if isinstance(process, Api))

    async def api(self, **settings: object) -> Api:
        """Start a pod and wait until it answers."""
        return await self.start_api(**settings).up()

    def start_api(self, **settings: object) -> Api:
        """Start a pod, or what should become one."""
        api = Api(self._log("api"), self._environment({"port": free_port(), **settings}))
        self.processes.append(api)
        return api

    async def worker(
        self,
        *,
        ready: bool = True,
        within_s: float = 25,
        launcher: Sequence[str] = (),
        **settings: object,
    ):
        """Start a worker, maybe by a command that starts it, and wait until it is ready."""
        worker = Process("worker", self._log("worker"), self._environment(settings), launcher)
        self.processes.append(worker)
        if ready:

            async def look() -> bool:
                assert worker.popen.poll() is None, worker.text()
                return any(
                    info.pid == worker.pid and info.state == WorkerState.READY
                    for info in await self.workers()
                )

            await eventually(look, within_s=within_s, what="worker")
        return worker

    async def ready_workers(self, count: int) -> None:
        """Wait until so many workers are ready."""

        async def look() -> bool:
            states = [info.state for info in await self.workers()]
            return states.count(WorkerState.READY) == count

        await eventually(look, within_s=25, what=f"{count} ready workers")

    async def workers(self) -> list[WorkerInfo]:
        """The roster."""
        return await read_workers(self.scripts, lease_s=LEASE_S)

    async def owner(self, task_id: str) -> Process:
        """The process that runs a task."""
        shard = Keys(shard_of(task_id) or 0)

        async def look() -> Process | None:
            fields = await self.scripts.task_fields(shard, task_id)
            infos = {info.id: info.pid for info in await self.workers()}
            pid = infos.get(fields.get("worker", ""))
            return next((p for p in self.processes if p.pid == pid), None)

        return await eventually(look, what="owner of the task")

    async def quiet(self, within_s: float = 10.0) -> None:
        """No task waits or runs, on Redis and in the workers (I13)."""

        async def look() -> bool:
            workers = await self.workers()
            queues = [key async for key in self.redis.scan_iter("*:queue:*")]
            lengths = [await self.redis.xlen(key) for key in queues]
            return not any(lengths) and all(worker.running == 0 for worker in workers)

        await eventually(look, within_s=within_s, what="quiet")

    async def keys_without_ttl(self) -> list[bytes]:
        """Keys that would stay for ever."""
        return [key async for key in self.redis.scan_iter("*") if await self.redis.ttl(key) == -1]


async def within(seconds: float, coroutine: Any) -> Any:
    """A bound on a hang."""
    async with asyncio.timeout(seconds):
        return await coroutine


def monotonic() -> float:
    return time.monotonic()
