"""An upgrade and a way back under load: pods and workers of two versions in one fleet.

The other version is a commit of this repository: OTHER, or what MIXED_VERSIONS_WITH names.
MIXED_VERSIONS_RPS asks more often than 6 times a second.
"""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.support.callers import Caller, load
from tests.support.fault_report import FaultRun
from tests.support.faults import prompt
from tests.support.local_fleet import Api, LocalFleet, Process
from tests.support.waiting import eventually

from millstream.shared.states import WorkerState

ROOT = Path(__file__).parents[2]
OTHER = os.environ.get("MIXED_VERSIONS_WITH", "2bcb482")
RATE = float(os.environ.get("MIXED_VERSIONS_RPS", "6"))
TOKENS = 40


@pytest.fixture
def other(redis_url: str, tmp_path: Path) -> Path:
    """The source of the other version."""
    if not redis_url.startswith("redis://"):
        pytest.skip("the other version knows neither Redis Cluster nor Sentinel")
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", OTHER, "src"],
        capture_output=True,
        check=False,
        timeout=20,
    )
    if archive.returncode:
        pytest.skip(f"this checkout has no commit {OTHER}: {archive.stderr.decode()[-200:]}")
    folder = tmp_path / "other"
    folder.mkdir()
    subprocess.run(["tar", "-xC", str(folder)], input=archive.stdout, check=True, timeout=20)
    # That a process with this path runs the other version.
    look = [sys.executable, "-c", "import millstream; print(millstream.__file__)"]
    paths = {**os.environ, "PYTHONPATH": str(folder / "src")}
    found = subprocess.run(look, env=paths, capture_output=True, text=True, check=True, timeout=20)
    assert Path(found.stdout).is_relative_to(folder)
    return folder / "src"


async def drain(old: Process) -> None:
    old.signal(signal.SIGTERM)
    assert await old.ended(within_s=20) == 0


async def replace_pod(fleet: LocalFleet, old: Api) -> Api:
    """The old one goes, then a new one comes at its address."""
    await drain(old)
    return await fleet.api(port=int(old.url.rpartition(":")[2]))


@pytest.mark.fault("mixed versions")
@pytest.mark.timeout(120)
async def test_an_upgrade_and_a_way_back_lose_nothing(
    fleet: LocalFleet, other: Path, fault: FaultRun
) -> None:
    fleet.source = other
    first, second, worker = await asyncio.gather(fleet.api(), fleet.api(), fleet.worker())
    urls = [first.url, second.url]
    text = prompt(tokens=TOKENS, rate=40)
    done: list[int] = []
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=20, limits=limits) as http:

        async def ask(number: int) -> None:
            await Caller(http, urls, number // 3).asks(number, text, tokens=TOKENS)
            done.append(number)

        async def answered(more: int) -> None:
            goal = len(done) + more

            async def look() -> bool:
                return len(done) >= goal

            await eventually(look, within_s=20, what="answers")

        async with load(ask, rate=RATE) as asked:
            await answered(3)
            fleet.source = None  # this version: a pod and a worker of each
            pod, new = await asyncio.gather(replace_pod(fleet, first), fleet.worker())
            await answered(3)
            await drain(worker)
            await answered(3)
            # And back: what the new ones wrote, the old ones read.
            fleet.source = other
            await asyncio.gather(replace_pod(fleet, pod), fleet.worker())
            await drain(new)
            await answered(3)
            fault.hits += 4
        assert sorted(done) == asked
    states = [info.state for info in await fleet.workers()]
    assert states.count(WorkerState.READY) == 1
    await fleet.quiet()
