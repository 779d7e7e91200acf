"""What a person and a machine are told of a run."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec.structs import astuple

from millstream.fleet.chaos.evidence import Evidence, TaskRecord
from millstream.fleet.chaos.history import Connection, History
from millstream.fleet.chaos.invariants import Broken, numbers_of, unlucky
from millstream.fleet.chaos.schedule import Fault

_GAP_ROWS = {
    Fault.KILL_WORKER: "worker killed",
    Fault.FREEZE_WORKER: "worker frozen",
    Fault.DRAIN_WORKER: "worker drained",
}
_OTHER_TAKEOVER = "worker lost otherwise"
_SAME_WORKER = "same worker"
_SHOWN_BROKEN = 20
_SHOWN_TOTALS = (
    *("streams", "connections", "tasks", "completed", "cancelled", "failed", "unlucky"),
    *("tokens", "takeovers", "lost", "duplicated", "reordered", "changed"),
    "zombie_writes_refused",
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Some durations, in seconds."""

    count: int
    p50: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Nearest ranks."""
        ranked = sorted(values) or [0.0]

        def rank(share: float) -> float:
            return round(ranked[max(0, math.ceil(share * len(ranked)) - 1)], 3)

        return cls(len(values), rank(0.5), rank(0.99), rank(1.0))


@dataclass(frozen=True, slots=True)
class Report:
    """A run in numbers."""

    command: str
    seed: int
    seconds: float
    whole: bool
    """Whether it was not cut short."""
    evidence: Evidence
    broken: list[Broken]
    missed: list[Fault]
    quiet_after_s: float
    zombie_writes_refused: int
    gaps: dict[str, Spread]
    longest_gap: Spread

    @property
    def clean(self) -> bool:
        """Whether every promise held, and every fault was there to break it."""
        return not self.broken and not (self.whole and self.missed)

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        evidence = self.evidence
        return {
            "command": self.command,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "clean": self.clean,
            "faults": {fault.name.lower(): evidence.struck[fault] for fault in Fault},
            "worker_deaths": {str(code): count for code, count in sorted(evidence.ends.items())},
            **_totals(evidence),
            "zombie_writes_refused": self.zombie_writes_refused,
            "quiet_after_s": round(self.quiet_after_s, 2),
            "longest_gap_s": _spread(self.longest_gap),
            "gaps_s": {name: _spread(spread) for name, spread in self.gaps.items()},
            "missed": [fault.name.lower() for fault in self.missed],
            "broken": [item._asdict() for item in self.broken],
        }

    def to_text(self, evidence_folder: Path | None) -> str:
        """The table, and the verdict."""
        told = self.to_dict()
        lines = ["", f"{'fault':<34}{'times':>7}"]
        lines += [f"{fault:<34}{self.evidence.struck[fault]:>7}" for fault in Fault]
        lines += ["", f"{'clients and tasks':<34}{'':>7}"]
        lines += [f"{name.replace('_', ' '):<34}{told[name]:>7}" for name in _SHOWN_TOTALS]
        lines += ["", f"{'gap between two tokens, s':<34}{'n':>7}{'p50':>8}{'p99':>8}{'max':>8}"]
        lines.append(_row("longest of each stream", self.longest_gap))
        lines += [_row(name, spread) for name, spread in self.gaps.items()]
        lines += ["", f"at rest {self.quiet_after_s:.1f} s after the last fault", ""]
        return "\n".join([*lines, *self._verdict(evidence_folder)])

    def _verdict(self, evidence_folder: Path | None) -> list[str]:
        ran = f"seed {self.seed}, {self.seconds:.0f} s"
        cut = "" if self.whole else ", cut short"
        if self.clean:
            return [f"CLEAN ({ran}{cut}): every promise held"]
        lines = [f"BROKEN ({ran}{cut}): {len(self.broken)} times"]
        lines += [
            f"  {item.invariant} {item.task_id or 'fleet'}: {item.what}"
            for item in self.broken[:_SHOWN_BROKEN]
        ]
        if self.whole:
            lines += [f"  never hit: {fault}" for fault in self.missed]
        if evidence_folder is not None:
            lines.append(f"The evidence is in {evidence_folder}")
        return lines


def measure_gaps(
    evidence: Evidence, lost_by: Mapping[tuple[str, int], Fault]
) -> tuple[dict[str, Spread], Spread]:
    """Gaps between two tokens on one connection: by what lay between them; the longest of each."""
    gaps: dict[str, list[float]] = defaultdict(list)
    longest: list[float] = []
    for history in evidence.histories:
        of_stream: list[float] = []
        for connection in history.connections:
            task = evidence.tasks.get(connection.task_id or "")
            if task is None or not history.form.streamed:
                continue
            attempts = _attempts(history, connection, task)
            tokens = [seen for seen in connection.seen if seen.kind == "token"]
            for (before, after), (first, second) in zip(
                pairwise(tokens), pairwise(attempts), strict=False
            ):
                gap = after.at - before.at
                of_stream.append(gap)
                if first == second:
                    gaps[_SAME_WORKER].append(gap)
                else:
                    fault = lost_by.get((task.id, first))
                    gaps[
                        _GAP_ROWS.get(fault, _OTHER_TAKEOVER) if fault else _OTHER_TAKEOVER
                    ].append(gap)
        if of_stream:
            longest.append(max(of_stream))
    order = [*_GAP_ROWS.values(), _OTHER_TAKEOVER, _SAME_WORKER]
    return {name: Spread.of(gaps[name]) for name in order}, Spread.of(longest)


def _attempts(history: History, connection: Connection, task: TaskRecord) -> list[int]:
    """Which attempt wrote each token of a connection; chats leave out those without text."""
    entries = [entry for entry in task.log if entry.event.kind == "t"]
    if history.form.numbered:
        return [entry.attempt for entry in entries[connection.after :]]
    return [entry.attempt for entry in entries if entry.event.text]


def _totals(evidence: Evidence) -> dict[str, int]:
    tasks = evidence.tasks.values()
    connections = [item for history in evidence.histories for item in history.connections]
    numbers = [numbers_of(connection) for connection in connections]
    states = [task.state for task in tasks]
    changed = sum(
        1
        for task in tasks
        if [(event.ids, event.data) for _, event in task.log if event.kind == "t"]
        != list(task.reference.events[: len(task.log) - (task.last is not None)])
    )
    return {
        "streams": sum(history.form.streamed for history in evidence.histories),
        "connections": len(connections),
        "tasks": len(evidence.tasks),
        "completed": states.count("completed"),
        "cancelled": states.count("cancelled"),
        "failed": states.count("failed"),
        "unlucky": len(unlucky(evidence)),
        "tokens": sum(task.tokens for task in tasks),
        "takeovers": sum(max(0, int(task.fields.get("attempt", 0)) - 1) for task in tasks),
        "lost": sum(item.lost for item in numbers),
        "duplicated": sum(item.duplicated for item in numbers),
        "reordered": sum(item.reordered for item in numbers),
        "changed": changed,
    }


def _spread(spread: Spread) -> dict[str, float]:
    return {"n": spread.count, "p50": spread.p50, "p99": spread.p99, "max": spread.most}


def _row(name: str, spread: Spread) -> str:
    times = "".join(f"{value:>8.2f}" for value in (spread.p50, spread.p99, spread.most))
    return f"{name:<34}{spread.count:>7}{times}"


def write_evidence(folder: Path, report: Report) -> None:
    """Put down all that concerns the broken promises."""
    (folder / "report.json").write_text(json.dumps(report.to_dict(), indent=1), "utf-8")
    for task_id in {item.task_id for item in report.broken if item.task_id}:
        task = report.evidence.tasks.get(task_id)
        histories = [item for item in report.evidence.histories if task_id in item.task_ids]
        told = {
            "broken": [item.what for item in report.broken if item.task_id == task_id],
            "fields": task.fields if task else None,
            "log": [[entry.attempt, *astuple(entry.event)] for entry in task.log] if task else None,
            "reference": task.reference.events if task else None,
            "clients": [history.to_dict() for history in histories],
        }
        path = folder / f"broken-{task_id}.json"
        path.write_text(json.dumps(told, indent=1), "utf-8")
