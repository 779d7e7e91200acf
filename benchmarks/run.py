"""Every benchmark, one after the other, and one table of all targets.

    python -m benchmarks.run [--quick] [--only NAME]

`make bench-quick` and `make bench` run this. Each prints its own table as it goes, and leaves its
figures in build/bench; the table of all is in build/bench/targets.md and targets.json, and is made
of what lies there: of a benchmark that was left out, the figures of its last run.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time

from benchmarks.support.processes import ROOT
from benchmarks.support.targets import joint, read, table

FOLDER = ROOT / "build" / "bench"
# Each ends on its own before; this only bounds what a fault in one would cost the others.
MOST_S = {True: 110, False: 600}
FULL = {
    "relay": ["--rounds", "2", "--seconds", "2"],
    "ttft": [],
    "gaps": [],
    "worker_cost": [],
    "fleet_over_engine": ["--rounds", "2"],
    "prefill": ["--rounds", "2"],
    "sampling_cost": ["--rounds", "8", "--tokens", "32", "--ways", "greedy", "sampled"],
    "scale": [],
    "queue_cost": [],
    "sizing": [],
    "fair_queue": ["--seconds", "30"],
    "startup": [],
}
QUICK = {
    "relay": ["--quick"],
    "ttft": ["--quick"],
    "worker_cost": ["--streams", "16", "--steps", "100"],
    "startup": ["--rounds", "2"],
}


def run(name: str, arguments: list[str], most_s: float) -> str:
    """Run one; how it ended."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    left = ["--json", str(FOLDER / f"{name}.json")]
    with subprocess.Popen([*command, *left], cwd=ROOT, start_new_session=True) as process:
        try:
            return "done" if process.wait(most_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            return f"not done in {most_s:g} s"
        finally:
            if process.poll() is None:  # it ends what it started
                os.killpg(process.pid, signal.SIGINT)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    """Run them; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two minutes instead of twenty")
    parser.add_argument("--only", default="", help="benchmarks whose name has this in it")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    said: list[str] = []
    failed = False
    for name, arguments in (QUICK if options.quick else FULL).items():
        if options.only not in name:
            continue
        print(f"=== {name}", flush=True)
        began = time.monotonic()
        outcome = run(name, arguments, MOST_S[options.quick])
        failed |= outcome != "done"
        said.append(f"{name:17} {time.monotonic() - began:5.0f} s  {outcome}")
    rows = joint(read(FOLDER))
    (FOLDER / "targets.json").write_text(json.dumps({"targets": rows}, indent=1), "utf-8")
    (FOLDER / "targets.md").write_text(f"{table(rows)}\n", "utf-8")
    told = f"figures: {FOLDER.relative_to(ROOT)}/*.json; docs/performance.md tells how to read them"
    print("\n".join(["", *said, "", table(rows), f"\nload {os.getloadavg()[0]:.1f}; {told}"]))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
