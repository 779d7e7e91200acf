"""Turns the fleet's roster into what a waiting person reads: pure."""

from collections.abc import Mapping, Sequence

from millstream.shared.registry import WorkerInfo
from millstream.shared.states import WorkerState


class Progress:
    """Remembers what each worker process last did, and tells what is new."""

    def __init__(self) -> None:
        self._said: dict[int, str] = {}

    def news(
        self, names: Mapping[int, str], workers: Sequence[WorkerInfo]
    ) -> list[tuple[WorkerState, str]]:
        """A line for each worker (known by its process id) that does something else than before."""
        lines: list[tuple[WorkerState, str]] = []
        for worker in workers:
            name = names.get(worker.pid)
            if name is None:
                continue
            doing = describe(worker)
            # Progress in numbers would be a line every tick; what it does changes rarely.
            kind = doing.rstrip("0123456789%./ ()")
            if self._said.get(worker.pid) != kind:
                self._said[worker.pid] = kind
                lines.append((worker.state, f"{name}: {doing}"))
        return lines


def describe(worker: WorkerInfo) -> str:
    """What a worker does, in a few words."""
    match worker.state:
        case WorkerState.STARTING:
            return f"{worker.model}: {worker.note or 'starting'}"
        case WorkerState.READY:
            return f"{worker.model} is ready"
        case _:
            return f"{worker.model} is {worker.state.value}"


def summary(names: Mapping[int, str], workers: Sequence[WorkerInfo]) -> str:
    """One line on all workers that are not ready yet; empty when all are."""
    known = {worker.pid: worker for worker in workers}
    parts = [
        f"{name}: {describe(known[pid]) if pid in known else 'starting'}"
        for pid, name in names.items()
        if pid not in known or known[pid].state == WorkerState.STARTING
    ]
    return " · ".join(parts)
