"""Does to the fleet what the cards say, and notes whom it met."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.fleet.chaos.history import Form, History
from millstream.fleet.chaos.load import Load
from millstream.fleet.chaos.local_fleet import ChaosFleet, Member
from millstream.fleet.chaos.schedule import Card, Fault
from millstream.fleet.lifeline import send
from millstream.shared.connection import RedisError, is_transient

FREEZE_LEASES = 2
SLOW_S = 0.5
SILENT_S = 1.0


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that met its target."""

    fault: Fault
    target: str
    at: float


class Faults:
    """Strikes; what has an end of its own (a freeze, a slow link) ends by itself or in `heal`."""

    def __init__(self, fleet: ChaosFleet, load: Load) -> None:
        self._fleet = fleet
        self._load = load
        self._ending: set[asyncio.Task[None]] = set()
        self._frozen: dict[Member, int] = {}
        self._told_to_go: set[int] = set()
        self._restarting = False
        self.struck: list[Struck] = []
        self.lost_by: dict[tuple[str, int], Fault] = {}
        """Which fault took an attempt (task id, number) from its worker."""

    @property
    def counts(self) -> Counter[Fault]:
        """How often each fault hit."""
        return Counter(item.fault for item in self.struck)

    async def strike(self, card: Card) -> bool:
        """Do what the card says; False where there is nobody to do it to now."""
        match card.fault:
            case Fault.KILL_WORKER | Fault.FREEZE_WORKER | Fault.DRAIN_WORKER:
                target = await self._strike_worker(card)
            case Fault.KILL_POD | Fault.DRAIN_POD:
                target = self._strike_pod(card)
            case Fault.RESTART_REDIS:
                target = await self._restart_redis()
            case Fault.SLOW_LINK | Fault.RESET_LINK | Fault.BLACK_HOLE:
                target = self._strike_link(card)
            case Fault.POISON:
                self._load.poison()
                target = "all workers"
            case Fault.STOP_TASK:
                target = self._stop_task(card)
            case Fault.CUT_CLIENT:
                target = self._cut_client(card)
        if target is not None:
            self.struck.append(Struck(card.fault, target, time.monotonic()))
        return target is not None

    async def heal(self) -> None:
        """End all that still lasts."""
        for task in self._ending:
            task.cancel()
        if self._ending:
            await asyncio.wait(self._ending)
        for member, pid in list(self._frozen.items()):
            self._thaw(member, pid)
        for member in self._fleet.members:
            member.link.heal()

    async def _strike_worker(self, card: Card) -> str | None:
        targets = [
            member
            for member in self._fleet.kin("worker")
            if self._is_well(member) and self._fleet.worker_id(member) is not None
        ]
        # One must be left, or the promise that accepted tasks end does not hold.
        if len(targets) < 2:
            return None
        member = card.choose(targets)
        pid = member.supervisor.pid
        victims = await self._victims(member)
        if not pid or member.supervisor.pid != pid:
            return None
        match card.fault:
            case Fault.FREEZE_WORKER:
                self._frozen[member] = pid
                send(pid, signal.SIGSTOP)
                self._later(FREEZE_LEASES * self._fleet.settings.lease_s, self._thaw, member, pid)
            case Fault.DRAIN_WORKER:
                self._told_to_go.add(pid)
                send(pid, signal.SIGTERM)
            case _:
                send(pid, signal.SIGKILL)
        for victim in victims:
            self.lost_by.setdefault(victim, card.fault)
        return member.name

    async def _victims(self, member: Member) -> list[tuple[str, int]]:
        worker_id = self._fleet.worker_id(member)
        task_ids = [item.task_id for item in self._load.active if item.task_id is not None]
        try:
            owners = await self._fleet.owners(task_ids)
        except RedisError:
            return []
        return [
            (task_id, attempt) for task_id, (owner, attempt) in owners.items() if owner == worker_id
        ]

    def _strike_pod(self, card: Card) -> str | None:
        targets = [member for member in self._fleet.kin("api") if self._is_well(member)]
        if not targets:
            return None
        member = card.choose(targets)
        pid = member.supervisor.pid
        self._told_to_go.add(pid)
        send(pid, signal.SIGKILL if card.fault == Fault.KILL_POD else signal.SIGTERM)
        return member.name

    def _is_well(self, member: Member) -> bool:
        """Whether it serves: not starting, frozen, or told to go (again would be by force)."""
        pid = member.supervisor.pid
        frozen = member in self._frozen
        return member.supervisor.ready and pid != 0 and not frozen and pid not in self._told_to_go

    async def _restart_redis(self) -> str | None:
        if self._restarting:
            return None
        try:
            pid = await self._fleet.database_pid()
            os.kill(pid, signal.SIGTERM)
        except (RedisError, ProcessLookupError):
            return None
        self._restarting = True
        self._run(self._until_back(pid))
        return "valkey"

    async def _until_back(self, old_pid: int) -> None:
        while True:
            try:
                if await self._fleet.database_pid() != old_pid:
                    break
            except RedisError as error:
                if not is_transient(error):
                    raise
            await asyncio.sleep(0.1)
        self._restarting = False

    def _strike_link(self, card: Card) -> str | None:
        members = [
            item for item in self._fleet.members if item.link.healthy and item.link.connections
        ]
        if not members:
            return None
        member = card.choose(members)
        match card.fault:
            case Fault.RESET_LINK:
                member.link.reset()
            case Fault.BLACK_HOLE:
                member.link.silence()
                self._later(SILENT_S, member.link.heal)
            case _:
                member.link.slow_down(SLOW_S)
                self._later(self._fleet.settings.lease_s, member.link.heal)
        return member.name

    def _stop_task(self, card: Card) -> str | None:
        # A poison task has an end of its own to prove.
        targets = [
            item
            for item in self._load.active
            if item.task_id and not item.prompt.poison and not item.stop_sent
        ]
        if not targets:
            return None
        history = card.choose(targets)
        self._load.stop_task(history)
        return history.task_id

    def _cut_client(self, card: Card) -> str | None:
        targets: Sequence[History] = [
            item for item in self._load.active if item.scope is not None and item.form != Form.POLL
        ]
        if not targets:
            return None
        history = card.choose(targets)
        return (history.task_id or "unknown") if history.cut() else None

    def _thaw(self, member: Member, pid: int) -> None:
        if self._frozen.pop(member, None) is not None and member.supervisor.pid == pid:
            send(pid, signal.SIGCONT)

    def _later(self, seconds: float, act: Any, *arguments: Any) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            act(*arguments)

        self._run(wait())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
