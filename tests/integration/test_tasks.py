"""The native form: tasks that are left, resumed, read by many, and stopped."""

import asyncio

import httpx
import pytest
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.native import read, submit
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_task_from_submit_to_end(http: httpx.AsyncClient) -> None:
    answer = await http.post("/tasks", json={"prompt": '@fake {"tokens": 5}\nhi', "seed": 1})
    accepted = answer.json()
    task_id = accepted["task_id"]
    assert answer.status_code == 202
    assert accepted["status"] == "queued"
    assert accepted["queue_position"] == 1
    assert accepted["stream_url"] == f"/tasks/{task_id}/stream"
    assert accepted["stop_url"] == f"/tasks/{task_id}/stop"
    frames = [frame for frame in await read(http, task_id) if frame.event != "queued"]
    sse.check_native(frames)
    assert [frame.event for frame in frames] == ["token"] * 5 + ["completed"]
    assert all(frame.json["n"] == 1 for frame in frames[:5])
    usage = frames[-1].json["usage"]
    assert frames[-1].json["finish_reason"] == "stop"
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5

    task = (await http.get(f"/tasks/{task_id}")).json()
    assert task["status"] == "completed"
    assert task["text"] == sse.native_text(frames)
    assert task["usage"] == usage
    assert task["finish_reason"] == "stop"
    assert task["attempts"] == 1
    assert task["created_at"] <= task["started_at"] <= task["finished_at"]
    assert task["error"] is None
    assert set(task) == {
        "task_id", "status", "model", "text", "usage", "finish_reason", "attempts", "worker",
        "created_at", "started_at", "finished_at", "error",
    }  # fmt: skip


async def test_resume_from_every_number(http: httpx.AsyncClient) -> None:
    task_id = await submit(http, tokens=12)
    whole = [frame for frame in await read(http, task_id) if frame.event != "queued"]
    for after in range(13):
        rest = await read(http, task_id, after)
        sse.check_native(rest, first=after + 1)
        assert [frame.data for frame in rest] == [frame.data for frame in whole[after:]]
    answer = await http.get(f"/tasks/{task_id}/stream?last_event_id=10")
    assert [frame.id for frame in sse.parse(answer.text)] == ["11", "12", "13"]
    assert (await http.get(f"/tasks/{task_id}/stream?last_event_id=13")).status_code == 204
    for empty in ({"headers": {"Last-Event-ID": ""}}, {"params": {"last_event_id": ""}}):
        answer = await http.get(f"/tasks/{task_id}/stream", **empty)
        assert sse.parse(answer.text)[0].id == "1"


@pytest.mark.parametrize(
    "given", ["abc", "-1", "999999999", "1-0", "$", "1" * 10_000, "\uff11", " 1", "0x1", "14"]
)
async def test_a_wrong_last_event_id_is_a_400(http: httpx.AsyncClient, given: str) -> None:
    task_id = await submit(http, tokens=12)
    await read(http, task_id)
    answer = await http.get(f"/tasks/{task_id}/stream", params={"last_event_id": given})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_event_id"
    assert answer.json()["error"]["param"] == "last_event_id"


async def test_many_readers_on_two_pods_while_it_runs(
    shared_fleet: LocalFleet, http: httpx.AsyncClient
) -> None:
    other = await shared_fleet.api()
    task_id = await submit(http, tokens=60, rate=60)
    async with httpx.AsyncClient(base_url=other.url, timeout=20) as second:
        readers = await asyncio.gather(
            *(read(client, task_id, after) for client in (http, second) for after in (None, 0))
        )
    texts = set()
    for frames in readers:
        numbered = [frame for frame in frames if frame.event != "queued"]
        sse.check_native(numbered)
        assert len(numbered) == 61
        texts.add(sse.native_text(numbered))
    assert len(texts) == 1


async def test_a_reader_that_left_comes_back_on_another_pod(
    shared_fleet: LocalFleet, http: httpx.AsyncClient
) -> None:
    other = await shared_fleet.api()
    task_id = await submit(http, tokens=40, rate=40)
    seen: list[sse.Frame] = []
    async with http.stream("GET", f"/tasks/{task_id}/stream") as answer:
        async for frame in sse.frames(answer.aiter_lines()):
            if frame.event == "token":
                seen.append(frame)
            if len(seen) == 10:
                break
    async with httpx.AsyncClient(base_url=other.url, timeout=20) as second:
        rest = await read(second, task_id, 10)
    sse.check_native(seen + rest)
    assert len(seen + rest) == 41
    assert (await http.get(f"/tasks/{task_id}")).json()["attempts"] == 1


async def test_unknown_and_malformed_ids_are_the_same_404(http: httpx.AsyncClient) -> None:
    for task_id in ("t0-" + "a" * 26, "nope", "t9999-" + "a" * 26, "x" * 5000, "t0-%0Adata"):
        for method, path in (
            ("GET", f"/tasks/{task_id}"),
            ("GET", f"/tasks/{task_id}/stream"),
            ("POST", f"/tasks/{task_id}/stop"),
            ("DELETE", f"/tasks/{task_id}"),
        ):
            answer = await http.request(method, path)
            assert answer.status_code == 404, f"{method} {path}: {answer.text}"
            assert answer.json()["error"]["code"] == "task_not_found"


@pytest.mark.parametrize("behind", [b"", b"nonsense\r\n\r\n"])
async def test_a_task_is_told_to_who_says_no_more(shared_fleet: LocalFleet, behind: bytes) -> None:
    host, port = shared_fleet.url.removeprefix("http://").split(":")
    body = b'{"prompt": "x", "max_tokens": 1}'
    head = f"POST /tasks HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + body + behind)
    writer.write_eof()
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 202 Accepted\r\n")
    assert b'"stream_url"' in answer
    assert (b"HTTP/1.1 400 Bad Request" in answer) == bool(behind)
    await shared_fleet.quiet()


async def test_stop_while_running_is_at_once_and_idempotent(
    shared_fleet: LocalFleet, http: httpx.AsyncClient
) -> None:
    task_id = await submit(http, tokens=100_000, rate=50)
    reader = asyncio.create_task(read(http, task_id))

    async def some_text() -> bool:
        return bool((await http.get(f"/tasks/{task_id}")).json()["text"])

    await eventually(some_text, what="text")
    answers = [
        await http.post(f"/tasks/{task_id}/stop"),
        await http.delete(f"/tasks/{task_id}"),
        *await asyncio.gather(*(http.post(f"/tasks/{task_id}/stop") for _ in range(10))),
    ]
    stopped = answers[0].json()
    assert [answer.json() for answer in answers] == [stopped] * 12
    assert stopped["status"] == "cancelled"
    frames = [frame for frame in await reader if frame.event != "queued"]
    sse.check_native(frames)
    assert frames[-1].event == "cancelled"
    assert frames[-1].json["usage"] == stopped["usage"]
    assert stopped["usage"]["completion_tokens"] == len(frames) - 1
    await shared_fleet.quiet(within_s=2)


async def test_stop_of_a_finished_task_changes_nothing(http: httpx.AsyncClient) -> None:
    task_id = await submit(http, tokens=3)
    await read(http, task_id)
    answer = await http.post(f"/tasks/{task_id}/stop")
    assert answer.json()["status"] == "completed"
    assert answer.json()["usage"]["completion_tokens"] == 3
