"""`millstream up`: a whole fleet on this machine, and nothing of it left behind."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from millstream.fleet.embedded import EmbeddedValkey
from millstream.fleet.guard import Guard
from millstream.fleet.plan import Model, api_specs, choose_models, worker_specs
from millstream.fleet.ports import choose_ports, url_of
from millstream.fleet.readiness import Progress, ready_text, summary
from millstream.fleet.screen import Screen
from millstream.fleet.state_folder import StateFolder, default_state_folder
from millstream.fleet.supervisor import Supervisor
from millstream.shared.connection import is_transient, open_redis
from millstream.shared.errors import MillstreamError
from millstream.shared.registry import WorkerInfo, read_apis, read_workers
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings
from millstream.shared.states import WorkerState

_POLL_S = 0.25
# Once all are ready, the roster only tells that a process started again has become so.
_CALM_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What the command line adds to the settings."""

    apis: int = 1
    workers: int = 1
    models: Sequence[str] = ()
    verbose: bool = False


def run(settings: Settings, options: UpOptions) -> int:
    """Run the fleet until it is told to stop; the exit code.

    Raises:
        MillstreamError: it cannot run; everything that had been started has ended.
    """
    screen = Screen()

    async def main() -> int:
        return await Fleet(settings, options, screen).run()

    try:
        return asyncio.run(main())
    finally:
        screen.close()


class Fleet:
    """The processes of one `millstream up`, and the order in which they come and go."""

    def __init__(self, settings: Settings, options: UpOptions, screen: Screen) -> None:
        self._settings = settings
        self._options = options
        self._screen = screen
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._state: StateFolder | None = None
        self._valkey: EmbeddedValkey | None = None
        self._guard: Guard | None = None
        self._supervisors: list[Supervisor] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> int:
        """Bring the fleet up, keep it up, and take it down when told to."""
        self._install_signals()
        work = asyncio.create_task(self._work())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            work.cancel()
            await asyncio.wait({work})
            await self._take_down()
        if not work.cancelled():
            work.result()
        return 1 if self._force.is_set() else 0

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under nohup the hang-up is ignored, and must stay so.
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self._force if self._stop.is_set() else self._stop).set()

    async def _work(self) -> None:
        settings, options = self._settings, self._options
        models = choose_models(options.models, settings)
        embedded = "redis_url" not in settings.model_fields_set
        if embedded:
            self._valkey = await self._prepare_embedded()
            self._guard, redis_url = self._valkey.guard, self._valkey.url
        else:
            redis_url = settings.redis_url
            await self._check_redis(redis_url)
            self._guard = Guard(f"{os.getpid()}-{secrets.token_hex(8)}")
        ports = choose_ports(settings.host, settings.port, options.apis)

        if self._valkey is not None:
            self._screen.working("valkey: starting")
            await self._valkey.start()
            self._spawn(self._valkey.run())
        else:
            await self._guard.start()
        specs = [
            *api_specs(settings, models, ports=ports, redis_url=redis_url),
            *worker_specs(settings, models, per_model=options.workers, redis_url=redis_url),
        ]
        for spec in specs:
            supervisor = Supervisor(
                spec, guard=self._guard, screen=self._screen, verbose=options.verbose
            )
            self._supervisors.append(supervisor)
            self._spawn(supervisor.run())
        self._screen.say(_plan_text(models, apis=options.apis, workers=options.workers))
        urls = [url_of(settings.host, port) for port in ports]
        self._spawn(self._watch(redis_url, urls))
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def _prepare_embedded(self) -> EmbeddedValkey:
        settings = self._settings
        state = StateFolder(default_state_folder())
        try:
            state.claim()
        except MillstreamError:
            # Where the other fleet also has the port, that is the plainer thing to say.
            choose_ports(settings.host, settings.port, self._options.apis)
            raise
        self._state = state
        valkey = EmbeddedValkey(state, screen=self._screen, verbose=self._options.verbose)
        await valkey.prepare()
        return valkey

    async def _check_redis(self, url: str) -> None:
        from millstream.fleet.redis_check import check_redis

        for warning in await check_redis(url):
            self._screen.warn(warning)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(coroutine))

    async def _watch(self, redis_url: str, urls: Sequence[str]) -> None:
        """Tell how the fleet does, from what its processes say in the roster."""
        progress = Progress()
        announced = False
        async with open_redis(redis_url, pool_size=2) as client:
            scripts = Scripts(client)
            while True:
                workers = await self._read_roster(scripts)
                names = {item.pid: item.spec.name for item in self._supervisors if item.pid}
                waiting = {pid: name for pid, name in names.items() if name.startswith("worker")}
                for state, line in progress.news(waiting, workers):
                    if state != WorkerState.STARTING or not self._screen.moving:
                        self._screen.say(line)
                self._screen.working(summary(waiting, workers))
                first = next((item for item in workers if item.state == WorkerState.READY), None)
                if not announced and first is not None and await _takes_work(urls[0]):
                    announced = True
                    self._announce(urls, first.model)
                calm = announced and all(item.ready for item in self._supervisors)
                await asyncio.sleep(_CALM_POLL_S if calm else _POLL_S)

    async def _read_roster(self, scripts: Scripts) -> list[WorkerInfo]:
        """Our workers in the roster; also notes which of our processes have become ready."""
        host = socket.gethostname()
        lease_s = self._settings.lease_s
        pids = {item.pid: item for item in self._supervisors if item.pid}
        try:
            apis = await read_apis(scripts, lease_s=lease_s)
            workers = await read_workers(scripts, lease_s=lease_s)
        except Exception as error:
            if is_transient(error):
                return []
            raise
        ours = [item for item in workers if item.host == host and item.pid in pids]
        for api in apis:
            if api.host == host and api.pid in pids:
                pids[api.pid].mark_ready()
        for worker in ours:
            if worker.state == WorkerState.READY:
                pids[worker.pid].mark_ready()
        return ours

    def _announce(self, urls: Sequence[str], model: str) -> None:
        kept = f"Tasks are kept in {self._state.path}." if self._state else "Tasks stay in Redis."
        self._screen.say(ready_text(urls, model=model, state=kept))

    async def _take_down(self) -> None:
        """End the processes in order: workers and pods drain, then the database stops."""
        if self._supervisors:
            self._screen.working("")
            self._screen.say("Stopping: what runs is kept for the next start. (Again: at once.)")
        drain_s = self._settings.drain_s
        await asyncio.gather(
            *(item.stop(drain_s=drain_s, force=self._force) for item in self._supervisors)
        )
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._valkey is not None:
            await self._valkey.stop()
        elif self._guard is not None:
            await self._guard.close()
        if self._state is not None:
            self._state.close()


def _plan_text(models: Sequence[Model], *, apis: int, workers: int) -> str:
    names = ", ".join(model.name for model in models)
    return (
        f"Starting {apis} API {'pod' if apis == 1 else 'pods'} and "
        f"{workers * len(models)} {'worker' if workers * len(models) == 1 else 'workers'} "
        f"for {names}"
    )


async def _takes_work(url: str) -> bool:
    """Whether the pod says that it is ready."""
    parts = urlsplit(url)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                head = f"GET /ready HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
                writer.write(head.encode())
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    return False
