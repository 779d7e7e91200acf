"""A short chaos run as its user has it, and one that is interrupted."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from tests.support.local_fleet import clean_environment


async def start(folder: Path, *options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "millstream", "chaos", *options),
        cwd=folder,
        env=clean_environment() | {"TMPDIR": str(folder)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


def left_in(folder: Path) -> list[str]:
    """Processes that work in the run's folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder):
                found.append(process.name())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.timeout(150)
async def test_a_short_run_is_clean(tmp_path: Path) -> None:
    process = await start(
        tmp_path, "--seconds", "15", "--seed", "3", "--shards", "4", "--json", "report.json"
    )
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["clean"], output
    assert report["faults"] == {
        "kill_worker": 5,
        "freeze_worker": 2,
        "drain_worker": 2,
        "kill_pod": 1,
        "drain_pod": 1,
        "restart_redis": 1,
        "slow_link": 1,
        "reset_link": 1,
        "black_hole": 1,
        "poison": 3,
        "stop_task": 6,
        "cut_client": 6,
    }
    assert (report["lost"], report["duplicated"], report["reordered"]) == (0, 0, 0)
    # The faults hit: tasks moved, the frozen were refused, poison took its workers down.
    assert report["takeovers"] > 20
    assert report["worker_deaths"]["-9"] == 5
    assert report["worker_deaths"]["70"] >= 3
    assert report["failed"] >= 1
    assert report["tokens"] > 5_000
    assert "CLEAN (seed 3" in output
    assert not [name for name in os.listdir(tmp_path) if name.startswith("millstream-chaos")]
    assert left_in(tmp_path) == []


@pytest.mark.timeout(100)
async def test_an_interrupted_run_still_has_its_table(tmp_path: Path) -> None:
    process = await start(tmp_path, "--seconds", "600", "--seed", "3", "--workers", "3")
    assert process.stdout is not None
    lines = []
    while b"under fire" not in (line := await process.stdout.readline()):
        lines.append(line.decode())
        assert line, "".join(lines)
    process.send_signal(signal.SIGINT)
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    assert "cut short" in output
    assert "SIGKILL of a worker" in output
    assert left_in(tmp_path) == []
