"""One fleet per fault, and the count of what each fault did.

FAULT_RUNS=20 repeats each test and writes build/faults.json with a table of all faults.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.fault_report import FaultRun, save, table
from tests.support.faults import LEASE_S, RUNS
from tests.support.local_fleet import LocalFleet
from tests.support.store import Store

REPORT = Path(__file__).parents[2] / "build" / "faults.json"

# A short lease, since most of these tests wait for one to lapse.
SETTINGS = {"lease_s": LEASE_S, "keepalive_s": 0.5, "max_concurrent": 256}

_done: list[FaultRun] = []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if RUNS > 1 and "fault" in metafunc.fixturenames:
        metafunc.parametrize("fault", range(1, RUNS + 1), indirect=True)


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Iterator[FaultRun]:
    """Where a test counts; a run in which nothing was hit proves nothing, so it fails."""
    marker = request.node.get_closest_marker("fault")
    run = FaultRun(*marker.args, **marker.kwargs)
    yield run
    assert run.hits > 0, "the fault did not strike"
    _done.append(run)


@pytest.fixture
async def fleet(redis_url: str, tmp_path: Path) -> AsyncIterator[LocalFleet]:
    """As elsewhere, with these settings."""
    async with LocalFleet(redis_url, tmp_path, **SETTINGS) as local:
        yield local
        assert await local.keys_without_ttl() == []


@pytest.fixture
async def frail(store: Store, tmp_path: Path) -> AsyncIterator[LocalFleet]:
    """The same on a Valkey of its own, which the test ill-treats."""
    async with LocalFleet(store.url, tmp_path, **SETTINGS) as local:
        yield local
        assert await local.keys_without_ttl() == []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for run in _done:
        if run.note:
            terminalreporter.write_line(f"{run.fault}: {run.note}")
    if RUNS > 1:
        terminalreporter.section("faults")
        terminalreporter.write_line(table(save(REPORT, _done)))
        terminalreporter.write_line(f"also in {REPORT.relative_to(Path.cwd())}")
