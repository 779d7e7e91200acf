"""One real Valkey for the session; every test has a database of its own on it."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.local_fleet import LocalFleet, free_port
from tests.support.store import Store, start_valkey

from millstream.shared.connection import open_redis
from millstream.shared.scripts import Scripts

_numbers = itertools.count(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for fleet in item.funcargs.values() if isinstance(item, pytest.Function) else ():
            if isinstance(fleet, LocalFleet):  # its processes have not been ended yet
                report.sections.append(("logs of the fleet", fleet.logs()))
    return report


@pytest.fixture(scope="session")
def valkey_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = free_port()
    process = start_valkey(port, tmp_path_factory.mktemp("valkey"), "--appendonly", "no")
    yield port
    process.kill()
    process.wait(10)


@pytest.fixture
def redis_url(valkey_port: int) -> str:
    return f"redis://127.0.0.1:{valkey_port}/{next(_numbers)}"


@pytest.fixture
async def scripts(redis_url: str) -> AsyncIterator[Scripts]:
    async with open_redis(redis_url) as client:
        yield Scripts(client)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A Valkey of the test's own, which it may kill."""
    valkey = Store(tmp_path / "valkey")
    yield valkey
    valkey.end(signal.SIGKILL)


@pytest.fixture
async def frail(store: Store, tmp_path: Path) -> AsyncIterator[LocalFleet]:
    """A fleet on that Valkey."""
    async with LocalFleet(store.url, tmp_path) as local:
        yield local


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_fleet(
    valkey_port: int, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalFleet]:
    """One pod and one worker for all tests of a module, which must not harm them."""
    url = f"redis://127.0.0.1:{valkey_port}/{next(_numbers)}"
    async with LocalFleet(url, tmp_path_factory.mktemp("fleet")) as local:
        await asyncio.gather(local.api(keepalive_s=0.5), local.worker())
        yield local
        assert await local.keys_without_ttl() == []


@pytest.fixture
async def fleet(redis_url: str, tmp_path: Path) -> AsyncIterator[LocalFleet]:
    async with LocalFleet(redis_url, tmp_path) as local:
        yield local
        assert await local.keys_without_ttl() == []
