"""Real Valkeys for the session; every test has a database, or an empty cluster, of its own."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.link import Way
from tests.support.local_fleet import LocalFleet
from tests.support.redis_servers import KINDS, Servers
from tests.support.store import Store

from millstream.fleet.chaos.link import Link
from millstream.shared.connection import open_redis
from millstream.shared.scripts import Scripts


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
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """What `TEST_REDIS` asks for: `single` (the default), `cluster` or `sentinel`."""
    kind = KINDS[os.environ.get("TEST_REDIS", "single")]
    started = kind(tmp_path_factory.mktemp("redis"))
    try:
        started.start()
        yield started
    finally:
        started.kill()


@pytest.fixture
def redis_url(servers: Servers) -> str:
    return servers.fresh_url()


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
def way(store: Store) -> Way:
    """Where the link leads of those who are to suffer."""
    return Way(store.connect)


@pytest.fixture
async def link(way: Way) -> AsyncIterator[Link]:
    """A link to it that can be cut, silenced and slowed."""
    async with Link(way) as between:
        yield between


@pytest.fixture
async def frail(store: Store, tmp_path: Path) -> AsyncIterator[LocalFleet]:
    """A fleet on that Valkey."""
    async with LocalFleet(store.url, tmp_path) as local:
        yield local


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_fleet(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalFleet]:
    """One pod and one worker for all tests of a module, which must not harm them."""
    url = servers.fresh_url(shared=True)
    async with LocalFleet(url, tmp_path_factory.mktemp("fleet")) as local:
        await asyncio.gather(local.api(keepalive_s=0.5), local.worker())
        yield local
        assert await local.keys_without_ttl() == []


@pytest.fixture
async def fleet(redis_url: str, tmp_path: Path) -> AsyncIterator[LocalFleet]:
    async with LocalFleet(redis_url, tmp_path) as local:
        yield local
        assert await local.keys_without_ttl() == []
