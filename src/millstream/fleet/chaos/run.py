"""`millstream chaos`: a fleet, a crowd, faults, rest, and the verdict."""

import asyncio
import json
import shutil
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx2

from millstream.fleet.chaos.client import MODEL
from millstream.fleet.chaos.evidence import Evidence, read_dead, read_tasks, read_used
from millstream.fleet.chaos.faults import Faults
from millstream.fleet.chaos.invariants import judge, missed
from millstream.fleet.chaos.load import CLIENTS, Load
from millstream.fleet.chaos.local_fleet import ChaosFleet
from millstream.fleet.chaos.quiet import Probe, settle, unready_pods
from millstream.fleet.chaos.report import Report, measure_gaps, write_evidence
from millstream.fleet.chaos.schedule import TICK_S, Card, shuffled_deck
from millstream.fleet.embedded import NAME as VALKEY
from millstream.fleet.screen import Screen

INTERRUPTED = 130
# The crowd is in when this many tokens have come; a fault before that would meet nobody.
_WARM_TOKENS = 200
_WARM_WITHIN_S = 30.0
_SAY_S = 10.0
# For cards that have not yet found anybody when the deck is at its end.
_LATE_TICKS = 40
_LOG_WINDOW_S = 5
# I16: back to the baseline within 10 s and a lease.
_HEAL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """What the command line says."""

    seconds: float
    seed: int
    apis: int = 3
    workers: int = 6
    shards: int = 1
    clients: int = CLIENTS
    json_file: Path | None = None

    @property
    def command(self) -> str:
        """How to have the same again."""
        text = f"millstream chaos --seconds {self.seconds:g} --seed {self.seed}"
        default = ChaosOptions(seconds=0, seed=0)
        for name in ("apis", "workers", "shards", "clients"):
            if getattr(self, name) != getattr(default, name):
                text += f" --{name} {getattr(self, name)}"
        return text


def run(options: ChaosOptions) -> int:
    """Run it; the exit code: 0 clean, 1 a promise was broken, 130 interrupted twice."""
    screen = Screen()
    try:
        return asyncio.run(ChaosRun(options, screen).run())
    finally:
        screen.close()


class ChaosRun:
    """One run, from the first process to the table."""

    def __init__(self, options: ChaosOptions, screen: Screen) -> None:
        self._options = options
        self._screen = screen
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="millstream-chaos-"))

    async def run(self) -> int:
        """Run it; the exit code. The first signal ends the faults, the second one all."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # under nohup
            loop.add_signal_handler(number, self._on_signal)
        work = asyncio.create_task(self._work())
        force = asyncio.create_task(self._force.wait())
        await asyncio.wait({work, force}, return_when=asyncio.FIRST_COMPLETED)
        force.cancel()
        while not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=0.5)
        if work.cancelled():
            shutil.rmtree(self._folder, ignore_errors=True)
            return INTERRUPTED
        report = work.result()
        clean = report.clean
        if not clean:
            write_evidence(self._folder, report)
        self._screen.working("")
        self._screen.say(report.to_text(None if clean else self._folder))
        if self._options.json_file is not None:
            text = json.dumps(report.to_dict(), indent=1)
            await asyncio.to_thread(self._options.json_file.write_text, f"{text}\n", "utf-8")
        if clean:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            return 0
        self._screen.warn(f"millstream: a promise was broken; again: {self._options.command}")
        return 1

    def _on_signal(self) -> None:
        (self._force if self._stop.is_set() else self._stop).set()

    async def _work(self) -> Report:
        options = self._options
        self._screen.say(options.command)
        self._screen.say(f"Starting {options.apis} pods and {options.workers} workers")
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=100)
        async with (
            ChaosFleet(
                self._folder,
                apis=options.apis,
                workers=options.workers,
                shards=options.shards,
            ) as fleet,
            httpx2.AsyncClient(limits=limits, timeout=20) as http,
        ):
            load = Load(fleet.urls, http, seed=options.seed, clients=options.clients)
            try:
                return await self._torment(fleet, http, load)
            finally:
                await load.close()

    async def _torment(self, fleet: ChaosFleet, http: httpx2.AsyncClient, load: Load) -> Report:
        probe = Probe(fleet.urls, http)
        baseline_s = await probe.slowest()
        load.start()
        for _ in range(int(_WARM_WITHIN_S / TICK_S)):
            if load.tokens >= _WARM_TOKENS:
                break
            await asyncio.sleep(TICK_S)
        faults = Faults(fleet, load)
        begun_at = time.monotonic()
        await self._strike_all(fleet, faults, load)
        seconds = time.monotonic() - begun_at
        self._tell("healing", load, faults)
        await faults.heal()
        quiet_after_s, left = await settle(fleet, load)
        healed_after_s = await probe.healed_after(baseline_s, _HEAL_S + fleet.settings.lease_s)
        ends = sum((member.supervisor.ends for member in fleet.kin("worker")), Counter[int]())
        evidence = Evidence(
            histories=[*load.histories, *probe.histories],
            tasks=await read_tasks(
                fleet.redis, fleet.shards, max_tokens=fleet.settings.max_tokens_limit
            ),
            dead=await read_dead(fleet.redis, fleet.shards, MODEL),
            max_attempts=fleet.settings.max_attempts,
            unrest=left,
            healed_after_s=healed_after_s,
            unready=await unready_pods(fleet.urls, http),
            log_rates=_busiest(fleet.log.rates),
            ends=ends,
            struck=faults.counts,
            used=await read_used(fleet.scripts, shards=len(fleet.shards)),
        )
        gaps, longest = measure_gaps(evidence, faults.lost_by)
        return Report(
            command=self._options.command,
            seed=self._options.seed,
            seconds=seconds,
            whole=not self._stop.is_set(),
            evidence=evidence,
            broken=judge(evidence),
            missed=missed(faults.counts),
            quiet_after_s=quiet_after_s,
            zombie_writes_refused=sum(info.stale_refused for info in fleet.seen.values()),
            gaps=gaps,
            longest_gap=longest,
        )

    async def _strike_all(self, fleet: ChaosFleet, faults: Faults, load: Load) -> None:
        """Draw a card each tick; one that found nobody is tried again, also past the last."""
        waiting: list[Card] = []
        due_at = time.monotonic()
        said_at = due_at - _SAY_S
        deck = shuffled_deck(self._options.seed, self._options.seconds)
        for tick in range(len(deck) + _LATE_TICKS):
            if self._stop.is_set() or (tick >= len(deck) and not waiting):
                return
            fleet.check()
            if tick < len(deck) and (card := deck[tick]):
                waiting.append(card)
            waiting = [card for card in waiting if not await faults.strike(card)]
            due_at = max(due_at + TICK_S, time.monotonic())
            if self._screen.moving or time.monotonic() - said_at >= _SAY_S:
                said_at = time.monotonic()
                self._tell("under fire", load, faults)
            try:
                async with asyncio.timeout(due_at - time.monotonic()):
                    await self._stop.wait()
            except TimeoutError:
                continue

    def _tell(self, what: str, load: Load, faults: Faults) -> None:
        line = (
            f"{what}: {len(faults.struck)} faults, {len(load.histories)} requests, "
            f"{load.tokens} tokens"
        )
        if self._screen.moving:
            self._screen.working(line)
        else:
            self._screen.say(line)


def _busiest(rates: Counter[tuple[str, int]]) -> dict[str, float]:
    """By process, the most log lines a second over some seconds."""
    busiest: dict[str, float] = {}
    for name, second in list(rates):
        if name == VALKEY:
            continue  # its start alone is thirty lines
        lines = sum(rates[name, second + n] for n in range(_LOG_WINDOW_S))
        busiest[name] = max(busiest.get(name, 0.0), lines / _LOG_WINDOW_S)
    return busiest
