"""Several workers and models in one fleet."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import openai
import pytest
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.native import read, submit
from tests.support.waiting import eventually


async def test_two_workers_share_the_load(fleet: LocalFleet) -> None:
    await fleet.api()
    await asyncio.gather(fleet.worker(), fleet.worker())
    async with httpx.AsyncClient(base_url=fleet.url, timeout=20) as http:
        requests = [
            asyncio.create_task(
                http.post(
                    "/v1/chat/completions",
                    json={
                        "messages": [
                            {"role": "user", "content": '@fake {"tokens": 20, "rate": 10}'}
                        ]
                    },
                )
            )
            for _ in range(12)
        ]

        async def both() -> list[int]:
            running = [worker.running for worker in await fleet.workers()]
            return running if sum(running) == 12 else []

        shares = await eventually(both, what="twelve running tasks")
        assert len(shares) == 2
        assert min(shares) >= 3
        assert [answer.status_code for answer in await asyncio.gather(*requests)] == [200] * 12


async def test_models_are_those_of_live_workers(fleet: LocalFleet) -> None:
    api = await fleet.api()
    await asyncio.gather(fleet.worker(), fleet.worker(model="other/name:v2"))
    client = openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)

    async def listed() -> bool:
        return {model.id async for model in client.models.list()} == {"fake", "other/name:v2"}

    await eventually(listed, what="both models")
    assert (await client.models.retrieve("other/name:v2")).id == "other/name:v2"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("third")
    with pytest.raises(openai.BadRequestError) as two:
        await client.chat.completions.create(
            model=openai.omit,
            messages=[{"role": "user", "content": "x"}],  # type: ignore[arg-type]
        )
    assert two.value.param == "model"
    await client.close()


async def test_long_tasks_run_once(fleet: LocalFleet) -> None:
    """Neither one that takes many leases, nor those that wait for it (B17, B27)."""
    lease_s = 1
    api = await fleet.api()
    await asyncio.gather(*(fleet.worker(lease_s=lease_s, max_concurrent=1) for _ in range(2)))
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        long = [await submit(http, tokens=55, rate=10) for _ in range(2)]
        short = [await submit(http, tokens=12, rate=10) for _ in range(2)]
        await asyncio.gather(*(read(http, task_id) for task_id in long + short))
        tasks = [(await http.get(f"/tasks/{task_id}")).json() for task_id in long + short]
    for task in tasks:
        assert (task["status"], task["attempts"]) == ("completed", 1)
        assert task["finished_at"] - task["started_at"] > lease_s
    for task in tasks[:2]:
        assert task["finished_at"] - task["started_at"] > 5 * lease_s
    for task in tasks[2:]:
        assert task["started_at"] - task["created_at"] > 5 * lease_s
    assert {info.attempts_reclaimed for info in await fleet.workers()} == {0}


async def test_rolling_restarts_lose_no_task(fleet: LocalFleet) -> None:
    """Workers that left are struck off the group, and nothing of theirs with them (B21)."""
    lease_s = 0.5
    api = await fleet.api()
    old = await fleet.worker(lease_s=lease_s)
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        accepted: list[str] = []

        async def load() -> None:
            while True:
                accepted.append(await submit(http, tokens=10, rate=20))
                await asyncio.sleep(0.02)

        loading = asyncio.create_task(load())
        for _ in range(3):
            new = await fleet.worker(lease_s=lease_s)
            old.signal(signal.SIGTERM)
            assert await old.ended() == 0
            old = new

        async def struck_off() -> bool:
            # Silent for ten leases, and nothing pending.
            consumers = await fleet.redis.xinfo_consumers("{ms:0}:queue:fake", "workers")
            return len(consumers) < 3

        await eventually(struck_off, what="the end of old consumers")
        loading.cancel()
        await asyncio.wait({loading})
        await fleet.quiet()
        assert len(accepted) > 50
        for task_id in accepted:
            state = await fleet.redis.hget(f"{{ms:0}}:task:{task_id}", "state")
            assert state == b"completed"
    await fleet.quiet()


HOLD_THE_GIL = """
import ctypes, signal
signal.signal(signal.SIGUSR1, lambda *_: ctypes.PyDLL(None).sleep({seconds}))
"""


async def test_a_worker_that_holds_the_gil_loses_its_task_once(
    fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the lease's thread runs: one clean move, and never two writers (B30)."""
    lease_s = 1
    (tmp_path / "sitecustomize.py").write_text(HOLD_THE_GIL.format(seconds=2 * lease_s))
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{path}")
    api = await fleet.api(keepalive_s=0.5)
    await asyncio.gather(*(fleet.worker(lease_s=lease_s) for _ in range(2)))
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        expected = sse.native_text(await read(http, await submit(http, tokens=75, rate=25)))
        task_id = await submit(http, tokens=75, rate=25)
        frames: list[sse.Frame] = []
        async with http.stream("GET", f"/tasks/{task_id}/stream") as answer:
            async for frame in sse.frames(answer.aiter_lines()):
                if frame.event == "queued":
                    continue
                frames.append(frame)
                if len(frames) == 10:
                    holder = await fleet.owner(task_id)
                    holder.signal(signal.SIGUSR1)
        sse.check_native(frames)
        assert sse.native_text(frames) == expected
        assert len(frames) == 76
        task = (await http.get(f"/tasks/{task_id}")).json()
        assert task["attempts"] == 2

        async def refused() -> bool:
            infos = {info.pid: info for info in await fleet.workers()}
            return holder.pid in infos and infos[holder.pid].stale_refused >= 1

        await eventually(refused, what="the holder to be told")
        again = await read(http, task_id)
        assert sse.native_text(again) == expected
    attempts = [fields[b"a"] for _, fields in await fleet.redis.xrange(f"{{ms:0}}:log:{task_id}")]
    assert attempts == sorted(attempts)
    assert set(attempts) == {b"1", b"2"}
    await fleet.quiet()


async def test_the_first_worker_is_known_at_once(fleet: LocalFleet) -> None:
    """No request is refused for a view of the roster from before it joined."""
    api = await fleet.api()
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        refused = await http.post("/tasks", json={"prompt": "hello"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "no_worker"
        await fleet.worker(ready=False)

        async def joined() -> bool:
            await http.get("/ready")  # the pod looks, once a second at the most
            return bool(await fleet.scripts.remembered_models())

        await eventually(joined, within_s=25, what="the worker")
        assert (await http.post("/tasks", json={"prompt": "hello"})).status_code == 202
    await fleet.quiet()
