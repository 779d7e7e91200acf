"""What is known to go wrong between a stream's reader and its pod: ids, silence, half-closing."""

import asyncio
from urllib.parse import urlsplit

import httpx
import pytest
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.native import read, submit
from tests.support.waiting import eventually


@pytest.mark.asyncio(loop_scope="module")
async def test_a_wrong_last_event_id_in_the_header_is_a_400(shared_fleet: LocalFleet) -> None:
    """Never a 500, and never a read that waits for what comes (B60)."""
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as http:
        task_id = await submit(http, tokens=12)
        await read(http, task_id)
        path = f"/tasks/{task_id}/stream"
        for given in (
            *(b"abc", b"-1", b"999999999", b"1" * 10_000, b"x" * 10_000, b"\xef\xbc\x91", b"1-0"),
            *(b"1-0-0", b"$", b"0x1", b"1e1", b"1,2", b"+1", b"14", b"undefined", b"null", b"\xff"),
        ):
            answer = await http.get(path, headers={b"Last-Event-ID": given})
            assert answer.status_code == 400, (given, answer.text)
            assert answer.json()["error"]["code"] == "invalid_event_id"
        for given in ("1-0-0", "😀", "1\n", "\0", "null"):
            answer = await http.get(path, params={"last_event_id": given})
            assert answer.status_code == 400, (given, answer.text)
        # The header is newer than the URL, which a browser repeats.
        answer = await http.get(f"{path}?last_event_id=2", headers={"Last-Event-ID": "11"})
        assert [frame.id for frame in sse.parse(answer.text)] == ["12", "13"]


@pytest.mark.asyncio(loop_scope="module")
async def test_an_expired_log_is_gone_and_not_skipped(shared_fleet: LocalFleet) -> None:
    """A reader whose events are no longer kept is told so, not given later ones (B55)."""
    redis = shared_fleet.redis
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as http:
        task_id = await submit(http, tokens=12)
        await read(http, task_id)
        # A log expires as a whole, with its task; only the tombstone is left.
        assert await redis.delete(*(f"{{ms:0}}:{kind}:{task_id}" for kind in ("task", "log"))) == 2
        for method, path in (
            ("GET", f"/tasks/{task_id}"),
            ("GET", f"/tasks/{task_id}/stream?last_event_id=5"),
            ("GET", f"/tasks/{task_id}/stream"),
            ("POST", f"/tasks/{task_id}/stop"),
        ):
            answer = await http.request(method, path)
            assert answer.status_code == 410, f"{method} {path}: {answer.text}"
            assert answer.json()["error"]["code"] == "task_expired"


async def test_three_reconnects_make_one_whole(fleet: LocalFleet) -> None:
    """Each connection goes on where the last one was cut, whatever lay between (B53, B56)."""
    pods = await asyncio.gather(fleet.api(), fleet.api())
    await fleet.worker()
    seen: list[sse.Frame] = []
    async with httpx.AsyncClient(timeout=20) as http:
        body = {"prompt": '@fake {"tokens": 80, "rate": 40}\nhello'}
        task_id = (await http.post(f"{pods[0].url}/tasks", json=body)).json()["task_id"]
        connections = 0
        while not seen or seen[-1].event == "token":
            url = f"{pods[connections % 2].url}/tasks/{task_id}/stream"
            connections += 1
            last = {"Last-Event-ID": seen[-1].id or ""} if seen else {}
            async with http.stream("GET", url, headers=last) as answer:
                before = len(seen)
                async for frame in sse.frames(answer.aiter_lines()):
                    if frame.event == "queued":
                        assert frame.id is None
                        continue
                    seen.append(frame)
                    if len(seen) == before + 20 and connections <= 3:
                        break
    assert connections == 4
    sse.check_native(seen)
    assert len(seen) == 81


@pytest.mark.parametrize("route", ["native", "chat"])
async def test_silence_is_broken_while_nobody_works(fleet: LocalFleet, route: str) -> None:
    """Proxies cut what is silent, and a task may wait for its worker for long (B62)."""
    api = await fleet.api(model="fake", keepalive_s=0.5)
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        if route == "native":
            stream = http.stream("GET", f"/tasks/{await submit(http, tokens=1)}/stream")
        else:
            body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
            stream = http.stream("POST", "/v1/chat/completions", json=body)
        lines: list[str] = []
        async with asyncio.timeout(10), stream as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                if lines.count(": ping") == 4:
                    break
        assert lines[0] == ": ok"


async def test_a_half_closed_connection_does_not_end_a_task(fleet: LocalFleet) -> None:
    """`nc -N` and its like close their side after the request (uvicorn#1264, B44)."""
    api = await fleet.api()
    await fleet.worker()
    host, port = urlsplit(api.url).hostname, urlsplit(api.url).port
    async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
        task_id = await submit(http, tokens=40, rate=40)

        async def running() -> bool:
            return (await http.get(f"/tasks/{task_id}")).json()["status"] == "running"

        await eventually(running, what="a running task")
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"GET /tasks/{task_id}/stream HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.write_eof()
        async with asyncio.timeout(10):
            await reader.read()  # to its end, whenever that is
        writer.close()
        frames = await read(http, task_id)
        sse.check_native(frames)
        assert (frames[-1].event, len(frames)) == ("completed", 41)
    assert "Traceback" not in api.text()
