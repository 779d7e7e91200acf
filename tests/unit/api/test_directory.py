"""Which models there are, as a pod that has just started sees it."""

import asyncio
import signal

import pytest
from tests.support.store import Store

from millstream.api.directory import Directory
from millstream.shared.connection import RedisError, open_redis
from millstream.shared.scripts import Scripts
from millstream.shared.settings import Settings


async def test_a_pod_has_a_view_before_anyone_asks(store: Store) -> None:
    settings = Settings(on_demand_models="m")
    async with open_redis(store.url) as client:
        directory = Directory(Scripts(client), settings)
        store.send(signal.SIGSTOP)
        loading = asyncio.create_task(directory.load())
        with pytest.raises(RedisError):
            await directory.resolve("m")
        assert not loading.done()
        store.send(signal.SIGCONT)
        async with asyncio.timeout(20):
            await loading
        store.send(signal.SIGSTOP)
        assert await directory.resolve("m") == "m"
        store.send(signal.SIGCONT)
