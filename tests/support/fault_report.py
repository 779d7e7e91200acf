"""What faults did to streams: counted run by run, and told as one table."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path


@dataclass
class FaultRun:
    """One run of one fault; a test counts here what it sees, and then asserts."""

    fault: str
    hits: int = 0
    """How often the fault demonstrably struck."""
    streams: int = 0
    tokens: int = 0
    lost: int = 0
    duplicated: int = 0
    reordered: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """From the blow to the next event, of each stream that was running."""
    bar_s: float | None = None
    """The longest gap allowed on an idle machine."""
    note: str = ""
    """Other figures of the run."""

    def stream(self, numbers: Sequence[int], *, tokens: int) -> None:
        """Judge the numbers of all token events one client saw, over all its connections."""
        seen = set(numbers)
        lost = tokens - len(seen & set(range(1, tokens + 1)))
        duplicated = len(numbers) - len(seen)
        reordered = sum(later < earlier for earlier, later in pairwise(numbers))
        self.streams += 1
        self.tokens += len(seen)
        self.lost += lost
        self.duplicated += duplicated
        self.reordered += reordered
        assert (lost, duplicated, reordered) == (0, 0, 0), f"{numbers} of 1..{tokens}"


_COLUMNS = (
    "fault | runs | hits | streams | tokens | lost | duplicated | reordered"
    " | gap p50 | gap max | bar"
)


def table(runs: Iterable[FaultRun]) -> str:
    """A row per fault, as Markdown."""
    faults: dict[str, list[FaultRun]] = {}
    for run in runs:
        faults.setdefault(run.fault, []).append(run)
    lines = [f"| {_COLUMNS} |", "| --- |" + " ---: |" * 10]
    for fault in sorted(faults, key=_order):
        group = faults[fault]
        gaps = [gap for run in group for gap in run.gaps_s]
        bar = next((run.bar_s for run in group if run.bar_s is not None), None)
        counts = [
            sum(getattr(run, name) for run in group)
            for name in ("hits", "streams", "tokens", "lost", "duplicated", "reordered")
        ]
        times = [_seconds(statistics.median(gaps)), _seconds(max(gaps))] if gaps else ["", ""]
        cells = [fault, len(group), *counts, *times, _seconds(bar)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _order(fault: str) -> tuple[int, str]:
    """F2 comes before F10."""
    return int("".join(filter(str.isdigit, fault.partition(" ")[0])) or 0), fault


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def save(path: Path, runs: Sequence[FaultRun]) -> list[FaultRun]:
    """Put runs into the file; those of other faults that are there already stay. All of them."""
    known = [FaultRun(**row) for row in json.loads(path.read_text())] if path.exists() else []
    fresh = {run.fault for run in runs}
    merged = [run for run in known if run.fault not in fresh] + list(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(run) for run in merged], indent=1))
    return merged
