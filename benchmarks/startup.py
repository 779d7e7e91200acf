"""How long things take to be there: Python itself, the help, the API's import, the first token.

    python -m benchmarks.startup [--rounds 5] [--json FILE]

Commands are processes of their own, in turns; the first token is that of a chat which is asked for
as soon as a fleet of `millstream up` listens. All warm: files have been read, modules compiled and
the bundled model unpacked before. Medians of wall and CPU seconds; the CPU is what to read on a
machine that does other things.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

from benchmarks.support.first_token import first_token
from benchmarks.support.processes import ROOT, as_installed
from benchmarks.support.report import Row, finish

COMMANDS = {
    "python": ["-c", "pass"],
    "millstream --help": ["-m", "millstream", "--help"],
    # As `millstream api` does it.
    "import the API": [
        "-c",
        "from millstream.shared.imports import uncollected\n"
        "with uncollected(): import millstream.api.server",
    ],
}


def once(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a run."""
    began, before = time.monotonic(), _children_cpu_s()
    subprocess.run(
        [sys.executable, *command],
        check=True,
        cwd=ROOT,
        env=as_installed(),
        stdout=subprocess.DEVNULL,
        timeout=60,
    )
    return time.monotonic() - began, _children_cpu_s() - before


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default=None, help="a file for the figures")
    options = parser.parse_args(arguments)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(options.rounds + 1):
        for name, command in COMMANDS.items():
            taken[name].append(once(command))
    rows: list[Row] = []
    for name, runs in taken.items():
        walls, cpus = zip(*runs[1:], strict=True)  # the first reads the files
        figures = {"wall_s": statistics.median(walls), "cpu_s": statistics.median(cpus)}
        rows.append(Row("millstream", name, figures))
    starts = [first_token() for _ in range(options.rounds + 1)][1:]
    medians = {name: statistics.median(start[name] for start in starts) for name in starts[0]}
    rows.append(Row("millstream", "first token", medians))
    return finish("startup", rows, json_to=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
