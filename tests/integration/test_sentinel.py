"""A fleet on a master that Sentinels watch: it dies or is demoted, and the replica takes over."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import redis
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.native import read, submit
from tests.support.redis_servers import SERVICE, SentinelServers
from tests.support.waiting import eventually, until

from millstream.shared.keys import Keys


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelServers]:
    servers = SentinelServers(tmp_path_factory.mktemp("sentinel"))
    try:
        servers.start()
        yield servers
    finally:
        servers.kill()


@pytest.fixture
async def watched(pair: SentinelServers, tmp_path: Path) -> AsyncIterator[LocalFleet]:
    async with LocalFleet(pair.fresh_url(), tmp_path) as fleet:
        yield fleet


@pytest.mark.parametrize("how", ["killed", "demoted"])
async def test_streams_survive_a_failover(
    pair: SentinelServers, watched: LocalFleet, how: str
) -> None:
    api = await watched.api(keepalive_s=0.5)
    await watched.worker()
    old = pair.master
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        tasks = [await submit(http, tokens=100, rate=20) for _ in range(4)]
        readers = [asyncio.create_task(read(http, task_id)) for task_id in tasks]

        async def under_way() -> bool:
            texts = [(await http.get(f"/tasks/{task_id}")).json()["text"] for task_id in tasks]
            return all(len(text.split()) >= 5 for text in texts)

        await eventually(under_way, what="first tokens")
        if how == "killed":
            old.kill()
        else:
            pair.sentinel.call("SENTINEL", "FAILOVER", SERVICE)
        await until(lambda: pair.master.port != old.port, within_s=20)
        for reader in readers:
            frames = await reader
            sse.check_native(frames)
            assert frames[-1].event == "completed", frames[-1]
            assert len(sse.native_text(frames).split()) == 100

        async def accepted() -> bool:
            answer = await http.post("/tasks", json={"prompt": 'x\n@fake {"tokens": 5}'})
            if answer.status_code != 202:
                return False
            frames = await read(http, answer.json()["task_id"])
            return frames[-1].event == "completed"

        await eventually(accepted, within_s=15, what="a new task")
    assert "role:master" in pair.master.call("INFO", "replication")
    with redis.Redis(port=pair.master.port, db=1) as client:
        for task_id in tasks:
            assert client.xlen(Keys(0).log(task_id)) == 101
