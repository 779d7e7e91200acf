"""Every benchmark that needs no fleet of its own and no model, one after the other.

    python -m benchmarks.run [--quick]

`make bench-quick` and `make bench` run this. Each prints its own table as it goes, and leaves its
figures in build/bench.
"""

import argparse
import subprocess
import sys
import time

from benchmarks.support.processes import ROOT

FOLDER = ROOT / "build" / "bench"
# Each ends on its own long before; this only bounds what a fault in one would cost the others.
MOST_S = {True: 110, False: 900}
FULL = {
    "relay": [],
    "worker_cost": [],
    "scale": [],
}
QUICK = {
    "relay": ["--quick"],
    "worker_cost": ["--streams", "16", "--steps", "100"],
}


def main() -> int:
    """Run them; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two minutes instead of twenty")
    quick = parser.parse_args().quick
    FOLDER.mkdir(parents=True, exist_ok=True)
    said: list[str] = []
    failed = False
    for name, arguments in (QUICK if quick else FULL).items():
        print(f"=== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
        began = time.monotonic()
        try:
            subprocess.run(
                [*command, "--json", str(FOLDER / f"{name}.json")],
                cwd=ROOT,
                check=True,
                timeout=MOST_S[quick],
            )
            outcome = "done"
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            outcome, failed = f"failed: {error}", True
        said.append(f"{name:15} {time.monotonic() - began:5.0f} s  {outcome}")
    print("\n".join(["", *said, f"figures: {FOLDER.relative_to(ROOT)}/*.json"]))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
