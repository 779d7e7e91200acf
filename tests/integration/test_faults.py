"""Workers that die, freeze or are told to go: the text goes on and equals an undisturbed run."""

import asyncio
import json
import signal

import httpx
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.waiting import eventually

TOKENS, RATE = 60, 50


def prompt(**directive: object) -> str:
    return f"@fake {json.dumps({'tokens': TOKENS, 'rate': RATE, **directive})}\nonce upon a time"


async def reference(http: httpx.AsyncClient, **directive: object) -> str:
    """The text of an undisturbed run."""
    answer = await http.post("/tasks", json={"prompt": prompt(**directive)})
    task_id = answer.json()["task_id"]
    return sse.native_text(sse.parse((await http.get(f"/tasks/{task_id}/stream")).text))


async def test_an_engine_error_is_tried_again_and_then_told(fleet: LocalFleet) -> None:
    api = await fleet.api(keepalive_s=0.5)
    await fleet.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        body = {"messages": [{"role": "user", "content": prompt(error_at=4)}]}
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "max_attempts")
        streamed = await http.post("/v1/chat/completions", json={**body, "stream": True})
        frames = sse.parse(streamed.text)
        assert frames[-1].json["error"]["code"] == "max_attempts"
        assert all('finish_reason":"' not in frame.data for frame in frames)
    await fleet.quiet()


async def test_a_worker_killed_alone_is_replaced_by_a_later_one(fleet: LocalFleet) -> None:
    api = await fleet.api(keepalive_s=0.5)
    only = await fleet.worker(lease_s=1)
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        task = (
            await http.post(
                "/tasks", json={"prompt": prompt(bytes=["f0", "9f", "98", "80"], rate=4, tokens=4)}
            )
        ).json()

        async def two_tokens() -> bool:
            return await fleet.redis.xlen("{ms:0}:log:" + task["task_id"]) >= 2

        await eventually(two_tokens, what="two tokens")
        only.signal(signal.SIGKILL)
        await only.ended()
        await fleet.worker(lease_s=1)
        frames = sse.parse((await http.get(task["stream_url"])).text)
        sse.check_native(frames)
        assert sse.native_text(frames) == "😀"


async def test_bells_do_not_put_failover_off(fleet: LocalFleet) -> None:
    api = await fleet.api(keepalive_s=0.5)
    await asyncio.gather(fleet.worker(lease_s=1), fleet.worker(lease_s=1))
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        task = (await http.post("/tasks", json={"prompt": prompt(rate=20)})).json()
        owner = await fleet.owner(task["task_id"])
        owner.signal(signal.SIGKILL)
        reading = asyncio.create_task(http.get(task["stream_url"]))
        others = 0
        while not reading.done():  # some twenty bells a second
            await http.post("/tasks", json={"prompt": prompt(tokens=1)})
            others += 1
            await asyncio.wait({reading}, timeout=0.05)
        frames = [frame for frame in sse.parse((await reading).text) if frame.event != "queued"]
        sse.check_native(frames)
        assert len(frames) == TOKENS + 1
        assert others > 20
        assert (await http.get(f"/tasks/{task['task_id']}")).json()["attempts"] == 2
    await fleet.quiet()
