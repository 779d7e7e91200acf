"""What `millstream top` shows, wide and narrow."""

import io
from typing import Any

import pytest
from rich.console import Console

from millstream.fleet.top import NARROW, draw

FLEET: dict[str, Any] = {
    "models": [
        {
            "name": "smollm2-135m-instruct",
            "waiting": 12,
            "running": 32,
            "oldest_wait_s": 3.14,
            "tokens_per_s": 143.2,
        }
    ],
    "workers": [
        {
            "id": "machine-13539-0f6882",
            "model": "smollm2-135m-instruct",
            "state": "ready",
            "running": 16,
            "slots": 32,
            "tokens_per_s": 71.55,
            "attempts_reclaimed": 2,
            "started_at": 1000.0,
        }
    ],
    "apis": [{"id": "machine-13531-12ab9f", "url": "http://127.0.0.1:8000", "streams": 40}],
    "redis": {"name": "Valkey", "version": "9.1.2", "used_memory": 5_400_000},
}


def shown(width: int, *, narrow: bool) -> list[str]:
    """The lines on a terminal of that width."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(draw(FLEET, "http://127.0.0.1:8000", 1600.0, narrow=narrow))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize(("width", "narrow"), [(60, True), (NARROW, False)])
def test_nothing_is_cut(width: int, narrow: bool) -> None:
    lines = shown(width, narrow=narrow)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    (worker,) = [line for line in lines if "machine-13539-0f6882" in line]
    assert worker.split()[-2:] == ["10", "min"]
    assert "16/32" in worker
    assert ("smollm2-135m-instruct" in worker) is not narrow
