"""A fleet on a real Redis Cluster: its shards, a node that dies, a slot that moves."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support import sse
from tests.support.local_fleet import LocalFleet, clean_environment
from tests.support.native import read, submit
from tests.support.ports import free_port
from tests.support.redis_servers import ClusterServers, Valkey
from tests.support.sockets import numbered, opened, rest, text_of
from tests.support.waiting import eventually, until

from millstream.shared.connection import open_redis
from millstream.shared.keys import Keys
from millstream.shared.schemas import shard_of

SHARDS = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServers]:
    """Three primaries with a replica each."""
    servers = ClusterServers(tmp_path_factory.mktemp("cluster"), replicas=1)
    try:
        servers.start()
        yield servers
    finally:
        servers.kill()


@pytest.fixture
async def clustered(cluster: ClusterServers, tmp_path: Path) -> AsyncIterator[LocalFleet]:
    """A fleet with the default number of shards."""
    async with LocalFleet(cluster.fresh_url(), tmp_path, shards=SHARDS) as fleet:
        yield fleet
        assert await fleet.keys_without_ttl() == []


async def test_streams_stops_and_failovers_on_all_shards(
    cluster: ClusterServers, clustered: LocalFleet
) -> None:
    homes = {cluster.home_of(Keys(shard).tag).port for shard in range(SHARDS)}
    assert len(homes) == 3
    api, other, *_ = await asyncio.gather(
        clustered.api(), clustered.api(), *(clustered.worker(max_concurrent=32) for _ in range(2))
    )
    async with (
        httpx.AsyncClient(base_url=api.url, timeout=25) as http,
        httpx.AsyncClient(base_url=other.url, timeout=25) as elsewhere,
    ):
        tasks = [await submit(http, tokens=60, rate=20) for _ in range(2 * SHARDS)]
        assert Counter(shard_of(task_id) for task_id in tasks) == dict.fromkeys(range(SHARDS), 2)
        readers = [asyncio.create_task(read(elsewhere, task_id)) for task_id in tasks]
        stopped = [await submit(http, tokens=500, rate=10) for _ in range(SHARDS)]

        async def under_way() -> bool:
            answers = await asyncio.gather(*(http.get(f"/tasks/{one}") for one in tasks + stopped))
            return all(len(answer.json()["text"].split()) >= 3 for answer in answers)

        await eventually(under_way, what="first tokens")
        for task_id in stopped:
            answer = await http.post(f"/tasks/{task_id}/stop")
            assert answer.json()["status"] == "cancelled"
        first = await clustered.owner(tasks[0])
        first.kill()
        attempts: list[int] = []
        for task_id, reader in zip(tasks, readers, strict=True):
            frames = await reader
            sse.check_native(frames)
            assert frames[-1].event == "completed"
            assert len(sse.native_text(frames).split()) == 60
            attempts.append((await http.get(f"/tasks/{task_id}")).json()["attempts"])
        assert attempts[0] == 2
        assert set(attempts) <= {1, 2}
    await clustered.quiet()


async def test_max_queue_holds_over_all_shards(clustered: LocalFleet) -> None:
    api = await clustered.api(max_queue=10, model="fake")
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        answers = await asyncio.gather(
            *(http.post("/tasks", json={"prompt": str(at)}) for at in range(30))
        )
        statuses = Counter(answer.status_code for answer in answers)
        assert statuses == {202: 10, 503: 20}
        assert all(
            int(answer.headers["retry-after"]) >= 1
            for answer in answers
            if answer.status_code == 503
        )
        await clustered.worker()
        for answer in answers:
            if answer.status_code == 202:
                frames = await read(http, answer.json()["task_id"])
                assert frames[-1].event == "completed"


async def test_a_primary_that_dies_is_replaced_under_open_streams(
    cluster: ClusterServers, clustered: LocalFleet
) -> None:
    """Streams on its shards go on when its replica has taken over; the others never stop."""
    api = await clustered.api(keepalive_s=0.5)
    await clustered.worker(max_concurrent=32)
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        tasks = [await submit(http, tokens=120, rate=20) for _ in range(SHARDS)]
        readers = [asyncio.create_task(read(http, task_id)) for task_id in tasks]
        victim = cluster.home_of(Keys(1).tag)

        async def under_way() -> bool:
            texts = [(await http.get(f"/tasks/{task_id}")).json()["text"] for task_id in tasks]
            return all(len(text.split()) >= 10 for text in texts)

        await eventually(under_way, what="first tokens")
        victim.kill()
        for reader in readers:
            frames = await reader
            sse.check_native(frames)
            assert frames[-1].event == "completed"
            assert len(sse.native_text(frames).split()) == 120
        heir = await until(lambda: _other_home(cluster, victim, Keys(1).tag))
        assert heir.port != victim.port

        async def served() -> bool:
            answers = [
                await http.post("/v1/chat/completions", json=_short()) for _ in range(SHARDS)
            ]
            return all(answer.status_code == 200 for answer in answers)

        await eventually(served, within_s=15, what="all shards")
    victim.start()  # comes back as the replica; the next test wants six nodes


def _other_home(cluster: ClusterServers, victim: Valkey, key: str) -> Valkey | None:
    home = cluster.home_of(key)
    return None if home.port == victim.port else home


def _short() -> dict[str, object]:
    return {"messages": [{"role": "user", "content": 'hi\n@fake {"tokens": 3}'}]}


async def test_a_slot_that_moves_takes_its_streams_along(
    cluster: ClusterServers, clustered: LocalFleet
) -> None:
    """Valkey's atomic slot migration: MOVED for writers, an unsubscribe for readers.

    A WebSocket goes back to an earlier event while the slot is on its way.
    """
    api = await clustered.api()
    await clustered.worker()
    tag = Keys(0).tag
    source = cluster.home_of(tag)
    target = next(
        node
        for node in cluster.nodes
        if "role:master" in node.call("INFO", "replication") and node.port != source.port
    )
    slot = source.call("CLUSTER", "KEYSLOT", tag)
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        tasks = [await submit(http, tokens=60, rate=20) for _ in range(SHARDS)]
        readers = [asyncio.create_task(read(http, task_id)) for task_id in tasks]
        mine = next(task_id for task_id in tasks if shard_of(task_id) == 0)

        async def begun() -> bool:
            return len((await http.get(f"/tasks/{mine}")).json()["text"].split()) >= 5

        await eventually(begun, what="first tokens")
        node_id = target.call("CLUSTER", "MYID")
        async with opened(api.url, f"/tasks/{mine}/ws") as socket:
            seen = [json.loads(await socket.recv()) for _ in range(4)]
            source.call("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", node_id)
            await socket.send('{"type": "resume", "last_event_id": 2}')
            await until(lambda: cluster.home_of(tag).port == target.port)
            assert (await http.get(f"/tasks/{mine}")).json()["status"] == "running"
            frames, code = await rest(socket)
        assert [frame["id"] for frame in numbered(seen)][:3] == [1, 2, 3]
        resumed = next(at for at, frame in enumerate(frames) if frame["event"] == "resumed")
        events = numbered(frames[resumed:])
        assert [frame["id"] for frame in events] == list(range(3, 62))
        assert (events[-1]["event"], code) == ("completed", 1000)
        assert len(text_of(numbered(seen)[:2] + events).split()) == 60
        async with opened(api.url, f"/tasks/{mine}/ws?last_event_id=58") as socket:
            assert await rest(socket) == (events[-3:], 1000)
        for reader in readers:
            native = await reader
            sse.check_native(native)
            assert native[-1].event == "completed"
            assert len(sse.native_text(native).split()) == 60
    back = source.call("CLUSTER", "MYID")
    target.call("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", back)
    await until(lambda: cluster.home_of(tag).port == source.port)


async def test_a_node_of_a_cluster_under_a_plain_url_is_refused(
    cluster: ClusterServers, tmp_path: Path
) -> None:
    url = cluster.nodes[0].url
    async with LocalFleet(url, tmp_path) as fleet:
        worker = await fleet.worker(ready=False)
        assert await worker.ended() == 1
        assert "redis+cluster://" in worker.text()
        assert "Traceback" not in worker.text()


async def test_another_number_of_shards_is_refused(
    clustered: LocalFleet, cluster: ClusterServers
) -> None:
    await clustered.worker()
    odd, pod = await clustered.worker(ready=False, shards=2), clustered.start_api(shards=2)
    for process in (odd, pod):
        assert await process.ended() == 1
        assert "MILLSTREAM_SHARDS is 2 here and 4 at" in process.text()
        assert "Traceback" not in process.text()


async def test_a_single_server_under_a_cluster_url_is_refused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    valkey = Valkey(tmp_path_factory.mktemp("single")).start()
    try:
        url = f"redis+cluster://127.0.0.1:{valkey.port}"
        async with LocalFleet(url, tmp_path) as fleet:
            api = fleet.start_api()
            assert await api.ended() == 1
            assert "no Redis Cluster" in api.text()
            assert "Traceback" not in api.text()
    finally:
        valkey.kill()


async def test_calls_wait_for_their_turn(cluster: ClusterServers) -> None:
    async with open_redis(cluster.url, pool_size=2) as client:
        names = [f"{Keys(at % SHARDS).tag}:turn:{at}" for at in range(200)]
        await asyncio.gather(*(client.set(name, name, ex=60) for name in names))
        assert await asyncio.gather(*(client.get(name) for name in names)) == [
            name.encode() for name in names
        ]


async def test_who_gives_up_on_the_map_cuts_nobody_off(cluster: ClusterServers) -> None:
    """redis-py closes all connections when a reading of the map is cancelled."""
    async with open_redis(cluster.fresh_url(), retries=0) as opened:
        client: Any = opened
        waiting = asyncio.create_task(client.blpop([Keys(0).tag], timeout=1))
        await until(lambda: "blocked_clients:1" in cluster.home_of(Keys(0).tag).call("INFO"))
        client._initialize = True  # as after a lost connection
        asking = asyncio.create_task(client.get(Keys(1).tag))
        while not client._lock.locked():  # noqa: ASYNC110 - until it is being read
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert client._initialize, "the map had been read already"
        await client.rpush(Keys(0).tag, "heard")
        assert (await waiting)[1] == b"heard"


def test_doctor_looks_at_each_primary(cluster: ClusterServers, tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "millstream", "doctor", "--json"],
        env=clean_environment(redis_url=cluster.url, engine="fake", port=free_port()),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=25,
        check=False,
    )
    findings = {item["check"]: item for item in json.loads(answer.stdout)["findings"]}
    for shard in range(SHARDS):
        port = cluster.home_of(Keys(shard).tag).port
        assert findings[f"eviction 127.0.0.1:{port}"]["verdict"] == "ok"
    assert findings["cluster"] == {
        "check": "cluster",
        "verdict": "ok",
        "text": "all 16384 slots are served",
    }
    assert findings["permissions"]["verdict"] == findings["channels"]["verdict"] == "ok"
    assert answer.returncode == 0, answer.stdout
