"""`millstream up`: a whole fleet on this machine, and nothing of it left behind."""

import asyncio
import os
import secrets
import signal
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from millstream.api.auth.authenticator import Authenticator
from millstream.fleet.announcement import ready_text
from millstream.fleet.embedded import EmbeddedValkey
from millstream.fleet.guard import Guard
from millstream.fleet.plan import Model, api_specs, choose_models, worker_specs
from millstream.fleet.ports import choose_ports
from millstream.fleet.screen import Screen
from millstream.fleet.state_folder import StateFolder, default_state_folder, running_url
from millstream.fleet.supervisor import Supervisor
from millstream.shared.cancellation import cancel_until_done
from millstream.shared.content_filter import open_filters
from millstream.shared.errors import MillstreamError, SettingsError
from millstream.shared.listener import PortTaken, url_of
from millstream.shared.settings import Settings
from millstream.worker.engines.model_source import find_source


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
        # What pods and workers would refuse is told here, once.
        if settings.engine != "fake":
            for model in models:
                find_source(model.source)
        keyed = not Authenticator(settings).open
        open_filters(settings)
        embedded = "redis_url" not in settings.model_fields_set
        if embedded:
            self._valkey = await self._prepare_embedded()
            self._guard, redis_url = self._valkey.guard, self._valkey.url
        else:
            redis_url = settings.redis_url
            await self._check_redis(redis_url)
            self._guard = Guard(f"{os.getpid()}-{secrets.token_hex(8)}")
        ports = choose_ports(settings.host, settings.port, options.apis)
        names = [model.name for model in models]
        metrics_ports = (
            choose_ports(settings.host, settings.metrics_port, options.workers * len(models))
            if settings.metrics_port
            else []
        )

        # The client library takes a quarter of a second to import; Valkey starts meanwhile.
        importing = asyncio.create_task(asyncio.to_thread(import_module, "millstream.fleet.watch"))
        if self._valkey is not None:
            self._screen.working("valkey: starting")
            await self._valkey.start()
            self._spawn(self._valkey.run())
            # Before the pods start, so that none ever reads what is forgotten here.
            waiting = await (await importing).forget_earlier_start(
                redis_url, models=names, shards=settings.shards
            )
            for model, tasks in waiting.items():
                self._screen.warn(
                    f"{model} has {tasks} unfinished {'task' if tasks == 1 else 'tasks'} of an "
                    f"earlier start, and is not served now; --model {model}=SOURCE goes on with it"
                )
        else:
            await self._guard.start()
        specs = [
            *api_specs(settings, models, ports=ports, redis_url=redis_url),
            *worker_specs(
                settings,
                models,
                per_model=options.workers,
                redis_url=redis_url,
                metrics_ports=metrics_ports,
            ),
        ]
        for spec in specs:
            supervisor = Supervisor(
                spec, guard=self._guard, screen=self._screen, verbose=options.verbose
            )
            self._supervisors.append(supervisor)
            self._spawn(supervisor.run())
        self._screen.say(_plan_text(models, apis=options.apis, workers=options.workers))
        urls = [url_of(settings.host, port) for port in ports]

        def announce(model: str) -> None:
            kept = f"in {self._state.path}" if self._state else "in Redis"
            if self._state:
                self._state.announce(urls[0])
            text = ready_text(urls, model=model, keyed=keyed, state=f"Tasks are kept {kept}.")
            self._screen.say(text)

        self._spawn(
            (await importing).watch(
                redis_url,
                supervisors=self._supervisors,
                screen=self._screen,
                lease_s=settings.lease_s,
                url=urls[0],
                models=names,
                announce=announce,
            )
        )
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def _prepare_embedded(self) -> EmbeddedValkey:
        settings = self._settings
        state = StateFolder(default_state_folder())
        try:
            state.claim()
        except MillstreamError as error:
            # Both at once: who moves the one out of the way would next be told of the other.
            if running_url() == url_of(settings.host, settings.port):
                also = f"port {settings.port} is that one's; take another --port"
                raise MillstreamError(f"{error.message}. Also, {also}") from None
            try:
                choose_ports(settings.host, settings.port, self._options.apis)
            except PortTaken as taken:
                raise MillstreamError(f"{error.message}. Also, {taken.message}") from None
            raise
        self._state = state
        valkey = EmbeddedValkey(state, screen=self._screen, verbose=self._options.verbose)
        await valkey.prepare()
        return valkey

    async def _check_redis(self, url: str) -> None:
        from millstream.fleet.doctor_redis import check_persistence
        from millstream.shared.address import mask_password
        from millstream.shared.connection import RedisError
        from millstream.shared.redis_check import Verdict, require_fit

        try:
            infos = await require_fit(url)
        except (RedisError, OSError) as error:
            raise SettingsError(
                f"no Redis answers at {mask_password(url)} ({error}); start it, or unset "
                "MILLSTREAM_REDIS_URL to use the embedded one"
            ) from None
        findings = [check_persistence(info, config={}) for info in infos]
        if risk := next((item for item in findings if item.verdict != Verdict.OK), None):
            self._screen.warn(f"{mask_password(url)}: {risk.text}")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(coroutine))

    async def _take_down(self) -> None:
        """End the processes in order: workers and pods drain, then the database stops."""
        if self._supervisors:
            self._screen.working("")
            asked = ": what runs is kept for the next start. (Again: at once.)"
            self._screen.say(f"Stopping{asked if self._stop.is_set() else ''}")
        drain_s = self._settings.drain_s
        await asyncio.gather(
            *(item.stop(drain_s=drain_s, force=self._force) for item in self._supervisors)
        )
        await cancel_until_done(self._tasks)
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
