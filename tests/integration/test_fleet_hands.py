"""What an administrator does to the fleet by HTTP: drains a worker, stops anyone's task."""

import asyncio
from pathlib import Path

import httpx
from tests.support import sse
from tests.support.faults import watch
from tests.support.local_fleet import LEASE_S, LocalFleet, Process
from tests.support.native import read, submit
from tests.support.waiting import eventually

from millstream.shared import keys
from millstream.shared.registry import heartbeat_ttl


async def id_of(fleet: LocalFleet, worker: Process) -> str:
    return next(info.id for info in await fleet.workers() if info.pid == worker.pid)


async def test_a_drained_worker_hands_over_and_ends(fleet: LocalFleet) -> None:
    """As by SIGTERM, from any pod; what it ran goes on elsewhere, and no token is lost."""
    await asyncio.gather(fleet.api(keepalive_s=0.5), fleet.worker(), fleet.worker())
    async with httpx.AsyncClient(base_url=fleet.url, timeout=25) as http:
        expected = sse.native_text(await read(http, await submit(http, tokens=40, rate=40)))
        task_id = await submit(http, tokens=40, rate=40)
        async with watch(http, task_id) as stream:
            await stream.upto(10)
            owner = await fleet.owner(task_id)
            path = f"/fleet/workers/{await id_of(fleet, owner)}/drain"
            order = await http.post(path)
            assert order.status_code == 202, order.text
            assert order.json()["status"] == "ordered"
            frames = await stream.end()
        sse.check_native(frames)
        assert sse.native_text(frames) == expected
        assert (await http.get(f"/tasks/{task_id}")).json()["attempts"] == 2
        assert await owner.ended() == 0
        assert "told to drain by an administrator" in owner.text()
        gone = await http.post(path)
        assert gone.status_code == 404
        error = gone.json()["error"]
        assert (error["code"], error["param"]) == ("worker_not_found", "worker_id")
    await fleet.quiet()


async def test_an_order_whose_message_was_lost_is_found(fleet: LocalFleet) -> None:
    worker = await fleet.worker()
    worker_id = await id_of(fleet, worker)
    ttl_ms = int(heartbeat_ttl(LEASE_S) * 1000)
    names = [keys.WORKERS, keys.drain(worker_id)]
    assert await fleet.scripts.runner.run("drain", names, [worker_id, ttl_ms, 60]) == 1
    assert await worker.ended() == 0


async def test_a_strange_page_lays_no_hand_on_a_fleet_without_keys(fleet: LocalFleet) -> None:
    """Its form or fetch has an Origin, and nothing else would have to be guessed (CSRF)."""
    _, worker = await asyncio.gather(fleet.api(), fleet.worker())
    async with httpx.AsyncClient(base_url=fleet.url, timeout=25) as http:
        task_id = await submit(http, tokens=100_000, rate=20)
        drain = f"/fleet/workers/{await id_of(fleet, worker)}/drain"
        stop = f"/fleet/tasks/{task_id}/stop"
        for path in (drain, stop):
            for origin in ("https://evil.example", "null"):
                refused = await http.post(path, headers={"Origin": origin})
                assert refused.status_code == 403
                assert refused.json()["error"]["code"] == "origin_not_allowed"
            refused = await http.post(path, headers={"Host": "rebound.example"})
            assert refused.json()["error"]["code"] == "host_not_allowed"
        (info,) = await fleet.workers()
        assert info.state == "ready"
        own = await http.post(stop, headers={"Origin": fleet.url})
        assert own.json()["status"] == "cancelled"


async def test_an_administrator_sees_and_stops_anyones_task(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    ann, admin = "key-of-ann-0123456789", "key-of-admin-0123456789"
    await fleet.api(api_keys=f"ann:{ann},admin:{admin}")
    await fleet.worker(max_concurrent=1)
    headers = {"Authorization": f"Bearer {ann}"}
    async with httpx.AsyncClient(base_url=fleet.url, timeout=25, headers=headers) as http:
        first = await submit(http, tokens=100_000, rate=20)
        as_admin = {"Authorization": f"Bearer {admin}"}

        async def rows() -> list[dict[str, object]]:
            answer = await http.get("/fleet/tasks", headers=as_admin)  # the fleet's one model
            assert answer.status_code == 200, answer.text
            return answer.json()["data"]

        async def running() -> bool:
            return [row["state"] for row in await rows()] == ["running"]

        await eventually(running, what="the first task")
        unknown = await http.get("/fleet/tasks?model=other", headers=as_admin)
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
        second = await submit(http, tokens=5)
        runs, waits = await rows()
        assert (runs["id"], runs["state"], runs["caller"]) == (first, "running", "key:ann")
        assert runs["worker"] == (await fleet.workers())[0].id
        assert (waits["id"], waits["state"], waits["worker"]) == (second, "queued", "")
        assert waits["started_at"] is None
        fields = "id caller state priority worker tokens created_at started_at"
        assert runs.keys() == set(fields.split())  # nothing of what is in it

        for path in (f"/fleet/tasks/{second}/stop", f"/fleet/tasks/{first}/stop"):
            assert (await http.post(path)).status_code == 403
            answer = await http.post(path, headers=as_admin)
            assert answer.json()["status"] == "cancelled"
        assert (await http.get(f"/tasks/{first}")).json()["status"] == "cancelled"
        again = await http.post(path, headers=as_admin)
        assert again.json() == answer.json()
        for unknown in ("nope", "t0-" + "a" * 26):
            missing = await http.post(f"/fleet/tasks/{unknown}/stop", headers=as_admin)
            assert missing.json()["error"]["code"] == "task_not_found"
    await fleet.quiet()
