"""The native events on WebSockets, as the websockets client sees them."""

import asyncio
import contextlib
import json
import signal
import socket

import httpx
import pytest
from tests.support.local_fleet import LocalFleet
from tests.support.native import submit
from tests.support.sockets import numbered, opened, rest, text_of
from tests.support.waiting import eventually
from websockets.exceptions import ConnectionClosed


def chat_body(prompt: str = "hello", **directive: object) -> str:
    content = f"@fake {json.dumps(directive)}\n{prompt}"
    return json.dumps({"messages": [{"role": "user", "content": content}]})


@pytest.mark.asyncio(loop_scope="module")
async def test_a_chat_on_a_socket(shared_fleet: LocalFleet) -> None:
    async with opened(shared_fleet.url, "/v1/chat/ws") as socket:
        await socket.send(chat_body(texts=["a", " \u2028", "c"]))
        frames, code = await rest(socket)
    assert code == 1000
    assert frames[0]["event"] == "task"
    events = numbered(frames)
    assert [frame["id"] for frame in events] == [1, 2, 3, 4]
    assert [frame["event"] for frame in events] == ["token"] * 3 + ["completed"]
    assert text_of(events) == "a \u2028c"
    assert events[-1]["data"]["finish_reason"] == "stop"
    task_id = frames[0]["data"]["task_id"]
    async with opened(shared_fleet.url, f"/tasks/{task_id}/ws?last_event_id=2") as socket:
        assert await rest(socket) == (events[2:], 1000)
    async with opened(shared_fleet.url, f"/tasks/{task_id}/ws?last_event_id=") as socket:
        assert (await socket.recv()).startswith('{"id": 1,')
    async with opened(shared_fleet.url, f"/tasks/{task_id}/ws?last_event_id=4") as socket:
        assert await rest(socket) == ([], 1000)


@pytest.mark.asyncio(loop_scope="module")
async def test_stop_and_resume_by_message(shared_fleet: LocalFleet) -> None:
    async with httpx.AsyncClient(base_url=shared_fleet.url) as http:
        task_id = await submit(http, tokens=100_000, rate=50)
    async with opened(shared_fleet.url, f"/tasks/{task_id}/ws") as socket:
        seen = [json.loads(await socket.recv()) for _ in range(12)]
        await socket.send('{"type": "resume", "last_event_id": 3}')
        while (frame := json.loads(await socket.recv()))["event"] != "resumed":
            seen.append(frame)
        assert frame["data"] == {"last_event_id": 3}
        assert [f["id"] for f in numbered(seen)] == list(range(1, len(numbered(seen)) + 1))
        again = [json.loads(await socket.recv()) for _ in range(10)]
        assert again[:5] == numbered(seen)[3:8]
        await socket.send('{"type": "stop"}')
        frames, code = await rest(socket)
    assert code == 1000
    assert frames[-1]["event"] == "cancelled"
    ids = [frame["id"] for frame in again + frames]
    assert ids == list(range(4, 4 + len(ids)))
    await shared_fleet.quiet()


WRONG = {
    "no json": ("nonsense", "invalid_json"),
    "no messages": ("{}", "missing_required_parameter"),
    "unknown field": ('{"messages": [], "zz": 1}', "invalid_value"),
    "bytes": (b"{}", "invalid_json"),
    "n": ('{"n": 2, "messages": [{"role": "user", "content": "x"}]}', "invalid_value"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_wrong_first_message_is_told(shared_fleet: LocalFleet, case: str) -> None:
    message, word = WRONG[case]
    async with opened(shared_fleet.url, "/v1/chat/ws") as socket:
        await socket.send(message)
        ((frame,), code) = await rest(socket)
    assert code == 4400
    assert (frame["event"], frame["data"]["error"]["code"]) == ("error", word)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_refused_has_a_frame_and_a_code(shared_fleet: LocalFleet) -> None:
    async with httpx.AsyncClient(base_url=shared_fleet.url) as http:
        task_id = await submit(http, tokens=3)
    for path, code, word in (
        (f"/tasks/t0-{'a' * 26}/ws", 4404, "task_not_found"),
        ("/tasks/nonsense/ws", 4404, "task_not_found"),
        (f"/tasks/{task_id}/ws?last_event_id=99", 4400, "invalid_event_id"),
        (f"/tasks/{task_id}/ws?last_event_id=x", 4400, "invalid_event_id"),
    ):
        async with opened(shared_fleet.url, path) as socket:
            ((frame,), closed) = await rest(socket)
        assert (closed, frame["data"]["error"]["code"]) == (code, word)
    for message in ('{"type": "dance"}', "[]", '{"type": "resume"}', '{"type": "resume", '
                    '"last_event_id": 5000}'):  # fmt: skip
        async with httpx.AsyncClient(base_url=shared_fleet.url) as http:
            running = await submit(http, tokens=10_000, rate=20)
        async with opened(shared_fleet.url, f"/tasks/{running}/ws") as socket:
            await socket.send(message)
            frames, closed = await rest(socket)
        assert (closed, frames[-1]["event"]) == (4400, "error")
        async with httpx.AsyncClient(base_url=shared_fleet.url) as http:
            await http.delete(f"/tasks/{running}")
    async with opened(shared_fleet.url, "/v1/chat/ws") as socket:
        with contextlib.suppress(ConnectionClosed):  # before all of it was sent
            await socket.send("x" * 4_000_000)
        assert await rest(socket) == ([], 1009)


async def test_an_overloaded_fleet_says_when_to_come_back(fleet: LocalFleet) -> None:
    api = await fleet.api(model="fake", max_queue=0)
    async with opened(api.url, "/v1/chat/ws") as socket:
        await socket.send(chat_body(tokens=1))
        ((frame,), code) = await rest(socket)
    assert (code, frame["data"]["error"]["code"]) == (1013, "queue_full")
    assert frame["data"]["retry_after_s"] >= 1


async def test_exact_over_a_dead_pod_and_a_dead_worker(fleet: LocalFleet) -> None:
    """A chat's socket dies with its pod; the task goes on, though its worker dies too."""
    pods = await asyncio.gather(fleet.api(), fleet.api())
    await asyncio.gather(fleet.worker(), fleet.worker())
    texts = [f" word{n}" for n in range(60)]
    async with opened(pods[0].url, "/v1/chat/ws") as socket:
        await socket.send(chat_body(texts=texts, rate=20))
        frames = [json.loads(await socket.recv()) for _ in range(10)]
        pods[0].signal(signal.SIGKILL)
        with contextlib.suppress(ConnectionClosed):
            while True:
                frames.append(json.loads(await socket.recv()))
    task_id = frames[0]["data"]["task_id"]
    events = numbered(frames)
    path = f"/tasks/{task_id}/ws?last_event_id={events[-1]['id']}"
    async with opened(pods[1].url, path) as socket:
        events += numbered([json.loads(await socket.recv()) for _ in range(5)])
        (await fleet.owner(task_id)).signal(signal.SIGKILL)
        more, code = await rest(socket)
    events += numbered(more)
    assert code == 1000
    assert [frame["id"] for frame in events] == list(range(1, 62))
    assert text_of(events) == "".join(texts)
    assert events[-1]["data"]["finish_reason"] == "stop"
    async with httpx.AsyncClient(base_url=pods[1].url) as http:
        assert (await http.get(f"/tasks/{task_id}")).json()["attempts"] == 2
    await fleet.quiet()


async def test_a_pod_that_goes_says_so_and_one_that_is_slow_is_cut(fleet: LocalFleet) -> None:
    api = await fleet.api(send_timeout_s=1)
    await fleet.worker()
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        large = await submit(http, texts=["x" * 1_000], tokens=16_000)
        slow = await submit(http, tokens=100_000, rate=20)
    # It reads nothing: what the kernel and the client hold is soon full.
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    small.connect(("127.0.0.1", int(api.url.rpartition(":")[2])))
    small.setblocking(False)
    path = f"/tasks/{large}/ws"
    async with opened(api.url, path, sock=small, max_queue=1, ping_interval=None):

        async def cut() -> bool:
            return "cut a WebSocket that took nothing" in api.text()

        await eventually(cut, within_s=25, what="cut")
    async with opened(api.url, f"/tasks/{slow}/ws") as reading:
        await reading.recv()
        api.signal(signal.SIGTERM)
        frames, code = await rest(reading)
    assert code == 1012
    assert all(frame["event"] == "token" for frame in frames)
    assert await api.ended() == 0
    assert "Traceback" not in api.text()
