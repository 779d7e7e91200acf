"""Benchmarks follow the code they measure: those of `make bench-quick`, in their smallest form."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.run import FULL
from benchmarks.support.half_load import SHARES, UNKNOWN, Clients
from benchmarks.support.tally import Tally
from benchmarks.support.targets import TARGETS, joint, table
from tests.support.local_fleet import LocalFleet
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]


@pytest.mark.model
@pytest.mark.timeout(90)  # it may be the first that unpacks the bundled model
def test_what_a_token_costs_a_worker(tmp_path: Path) -> None:
    told = figures(tmp_path, "worker_cost", "--streams", "2", "--steps", "8")
    assert [(row["who"].split()[0], row["case"]) for row in told["rows"]] == [
        ("millstream", "2 streams"),
        ("redis-py", "2 streams"),
    ]
    assert all(row["figures"]["us_per_token"] > 0 for row in told["rows"])


@pytest.mark.model
@pytest.mark.timeout(90)
def test_what_a_dtype_costs_in_quality(tmp_path: Path) -> None:
    told = figures(tmp_path, "quality", "--tokens", "64", "--dtypes", "float32", "bfloat16")
    rows = [row["figures"] for row in told["rows"]]
    assert len(rows) == 8
    for row in rows[:4]:
        assert (row["over_float32"], row["likeliest_as_float32_percent"]) == (1, 100)
    for row in rows[4:]:
        assert 0.9 < row["over_float32"] < 1.1
        assert row["likeliest_as_float32_percent"] > 80


def test_what_a_token_costs_a_pod(tmp_path: Path) -> None:
    short = ("--quick", "--no-peers", "--seconds", "0.5", "--only", "in step")
    told = json.dumps(figures(tmp_path, "relay", *short))
    assert "pod_us_per_token" in told


def test_what_a_first_token_takes(tmp_path: Path) -> None:
    few = ("--quick", "--no-peers", "--requests", "3", "--submits", "64")
    told = json.dumps(figures(tmp_path, "ttft", *few))
    assert "added_p50_ms" in told
    assert "submits_per_core_s" in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_ends_what_it_started(number: int) -> None:
    command = [sys.executable, "-m", "benchmarks.relay", "--no-peers", "--only", "in step"]
    process = psutil.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip

    def several() -> list[psutil.Process] | None:  # a Valkey, a pod and the clients
        found = process.children(recursive=True)
        return found if len(found) >= 3 else None

    children = await until(several, within_s=20)
    process.send_signal(number)
    assert await asyncio.to_thread(process.wait, 20) != 0
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []


async def test_the_clients_of_the_long_run_get_what_they_ask_for(fleet: LocalFleet) -> None:
    pod, other, _ = await asyncio.gather(
        fleet.api(), fleet.api(), fleet.worker(fake_tokens_per_s=100)
    )
    tally = Tally(apart="")
    clients = Clients([int(api.url.rpartition(":")[2]) for api in (pod, other)], tally, seed=1)
    forms = [*SHARES, UNKNOWN]
    await asyncio.gather(*map(clients.ask, forms))
    assert tally.errors == {}
    assert tally.close()["requests"] == dict.fromkeys(forms, 1)
    await fleet.quiet()


def test_all_targets_are_told_in_one_table() -> None:
    figure = {"added_p50_ms": 0.7}
    told = {"ttft": [{"who": who, "case": "first token", "figures": figure}
                     for who in ("millstream", "smg 1")]}  # fmt: skip
    first, *rest = joint(told)
    assert (first["millstream"], first["met"], first["peers"]) == (0.7, False, {"smg 1": 0.7})
    assert all(row["millstream"] is None for row in rest)
    assert {target.where[0] for target in TARGETS} <= FULL.keys()
    lines = table([first]).splitlines()
    assert lines[2].endswith("| ≤ 0.6 ms | 0.7 ms: not met | 1 of smg (1.76) | 0.7 |")
    assert {line.count("|") for line in lines} == {6}


def figures(folder: Path, name: str, *arguments: str) -> Any:
    """What a benchmark leaves for machines."""
    left = folder / "figures.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--json", str(left)]
    done = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=80
    )
    assert done.returncode == 0, done.stderr
    return json.loads(left.read_text("utf-8"))
