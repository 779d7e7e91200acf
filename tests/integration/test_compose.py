"""The services of docker-compose.yml, nginx among them, run as local processes."""

import asyncio
import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from tests.support import native, sse
from tests.support.compose_cluster import ComposeCluster
from tests.support.waiting import eventually

from millstream.api.body import largest_body
from millstream.shared.settings import Settings

# A minute beyond the usual limit: a machine without nginx installs it first.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

LARGEST_BODY = largest_body(Settings().max_prompt_chars)
JSON_TYPE = {"content-type": "application/json"}
SECRET = "secret-key"


# --- the whole cluster ---------------------------------------------------------------------------


@asynccontextmanager
async def open_cluster(*, workers: int = 1, **variables: str) -> AsyncIterator[ComposeCluster]:
    async with ComposeCluster(MILLSTREAM_ENGINE="fake", **variables) as started:
        yield await started.up(workers=workers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ComposeCluster]:
    """For tests that leave it as it was; at the end everything must stop in time, with 0."""
    async with open_cluster() as started:
        yield started
        living = [process for process in started.processes if process.alive]
        # Compose ends a service before those that it depends on.
        for kind in ("nginx", "api", "worker", "redis"):
            codes = await asyncio.gather(*(process.stop() for process in started.named(kind)))
            assert set(codes) <= {0}, (kind, codes)
        assert len(living) == 5
        assert started.left_behind() == []


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: ComposeCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{cluster.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as session:
        yield session


@pytest_asyncio.fixture(loop_scope="module")
async def http(cluster: ComposeCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=20) as session:
        yield session


def directed(**directive: object) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"@fake {json.dumps(directive)}\nhello"}]


def chat(**fields: object) -> dict[str, object]:
    return {"model": "fake", "messages": directed(tokens=3), **fields}


async def test_the_health_checks_hold(cluster: ComposeCluster) -> None:
    for process in [*cluster.named("api"), *cluster.named("worker")]:
        code, output = await cluster.check_health(process)
        assert (code, output) == (0, "")


async def test_tokens_come_through_one_by_one(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="fake", messages=directed(tokens=10, rate=20), stream=True
    )
    times = [
        time.monotonic()
        async for chunk in stream
        if chunk.choices and chunk.choices[0].delta.content
    ]
    assert len(times) == 10
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    # 9 gaps of 50 ms. A buffer would let them all arrive together at the end.
    assert times[-1] - times[0] > 0.3
    assert sum(gap > 0.02 for gap in gaps) >= 7, gaps


async def test_headers_of_a_stream_come_at_once_and_are_the_pods_own(
    http: httpx.AsyncClient, cluster: ComposeCluster
) -> None:
    body = chat(stream=True, messages=directed(tokens=2, delay_s=1.5))
    asked = time.monotonic()
    headers = {"accept-encoding": "gzip, br"}
    async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        waited = time.monotonic() - asked
        text = "".join([part async for part in answer.aiter_text()])
    assert waited < 1, "headers waited for the first token"
    assert sse.chat_text(sse.parse(text))
    assert "content-encoding" not in answer.headers
    assert answer.headers["server"] == "nginx"
    pod = f"http://{cluster.access_log()[0]['pod']}"
    async with (
        httpx.AsyncClient(base_url=pod) as direct,
        direct.stream("POST", "/v1/chat/completions", json=body) as plain,
    ):
        for name in ("content-type", "cache-control", "x-accel-buffering"):
            # nginx takes X-Accel-Buffering as a word to itself and does not pass it on.
            expected = None if name == "x-accel-buffering" else plain.headers.get(name)
            assert answer.headers.get(name) == expected
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-task-id"]


async def test_both_pods_get_work(http: httpx.AsyncClient, cluster: ComposeCluster) -> None:
    before = len(cluster.access_log())
    for _ in range(10):
        assert (await http.post("/v1/chat/completions", json=chat())).status_code == 200

    async def look() -> list[dict[str, Any]]:
        lines = cluster.access_log()[before:]
        return lines if len(lines) >= 10 else []

    lines = await eventually(look)
    assert sorted(Counter(line["pod"] for line in lines).values()) == [5, 5]
    assert all(line["task"] for line in lines)


async def test_a_stream_is_resumed_on_any_pod(http: httpx.AsyncClient) -> None:
    task_id = await native.submit(http, tokens=20)
    for after in (0, 5, 10, 15):
        frames = await native.read(http, task_id, after)
        sse.check_native(frames, first=after + 1)


async def test_the_pods_errors_pass_through(http: httpx.AsyncClient) -> None:
    too_large = json.dumps(chat(user="x" * LARGEST_BODY))
    requests = [
        (400, "/v1/chat/completions", json.dumps(chat(temperature=9))),
        (404, "/v1/chat/completions", json.dumps(chat(model="no/such"))),
        (413, "/v1/chat/completions", too_large),
        (413, "/tasks", too_large),
    ] * 3
    for status, path, body in requests:
        answer = await http.post(path, content=body, headers=JSON_TYPE)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert "nginx" not in answer.text
        if status == 413:
            assert str(LARGEST_BODY) in error["message"]
    answer = await http.get("/v1/models/no%2Fsuch")
    assert answer.status_code == 404
    assert "no/such" in answer.json()["error"]["message"]


async def test_what_nginx_refuses_itself_has_the_shape_of_openai(
    http: httpx.AsyncClient, cluster: ComposeCluster
) -> None:
    answer = await http.post("/tasks", content=b"x" * (33 * 2**20), headers=JSON_TYPE)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    answer = await http.get("/health", headers={"x-long": "y" * 100_000})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    host, port = cluster.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"no request at all\r\n\r\n")
    malformed = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await writer.wait_closed()
    assert b'"invalid_request_error"' in malformed
    assert b"nginx/" not in malformed


async def test_long_headers_pass(http: httpx.AsyncClient) -> None:
    answer = await http.get("/health", headers={"authorization": "Bearer " + "k" * 16_000})
    assert answer.status_code == 200


async def test_a_client_that_leaves_stops_its_task(http: httpx.AsyncClient) -> None:
    body = chat(stream=True, messages=directed(tokens=1000, rate=20))
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        task_id = answer.headers["x-task-id"]
        await anext(answer.aiter_bytes())

    async def look() -> bool:
        return (await http.get(f"/tasks/{task_id}")).json()["status"] == "cancelled"

    await eventually(look, within_s=5, what="the task's end")


async def test_the_access_log_holds_no_query(
    http: httpx.AsyncClient, cluster: ComposeCluster
) -> None:
    linked = {"referer": f"{cluster.url}/?key={SECRET}"}
    # Larger than what nginx keeps in memory: it would say so, and name the request.
    body = chat(user="x" * 1_000_000)
    answer = await http.post(f"/tasks?api_key={SECRET}", json=body, headers=linked)
    assert answer.status_code == 400
    url = f"/tasks/none/stream?ticket={SECRET}"
    assert (await http.get(url, headers=linked)).status_code == 401
    assert (await http.get(f"/health?token={SECRET}", headers=linked)).status_code == 200
    line = await _last_line(cluster, "/health")
    assert (line["status"], line["pod_status"]) == (200, "200")
    assert SECRET not in "".join(process.text() for process in cluster.processes)


async def test_the_error_log_holds_no_query() -> None:
    async with StubPod(answers=True).listening() as gone:
        pass
    async with ComposeCluster() as cluster:
        nginx = await cluster.start_nginx([gone.address])
        linked = {"referer": f"{cluster.url}/?key={SECRET}"}
        async with httpx.AsyncClient(base_url=cluster.url, headers=linked) as http:
            answer = await http.get(f"/tasks/x/stream?ticket={SECRET}")
            assert answer.status_code == 502
            line = await _last_line(cluster, "/tasks/x/stream")
            told = (line["status"], line["pod_status"], line["pod"], line["seconds"] < 2)
            assert told == (502, "502", gone.address, True)
            large = b"x" * (33 * 2**20)
            answer = await http.post(f"/tasks?api_key={SECRET}", content=large)
            assert answer.status_code == 413
            # As a full disk: nothing can be written where large bodies go.
            (cluster.folder / "nginx-0" / "nginx-client-body").rmdir()
            answer = await http.post(f"/tasks?api_key={SECRET}", content=large[: 2**20])
            assert answer.status_code == 500
        async with httpx.AsyncClient(base_url=cluster.doors[0].operators_url) as http:
            assert (await http.get(f"/fleet.json?token={SECRET}")).status_code == 502
        await _last_line(cluster, "/fleet.json")
        assert SECRET not in nginx.text()


async def _last_line(cluster: ComposeCluster, path: str) -> dict[str, Any]:
    """What the access log says of the last request, once it is this path's."""

    async def look() -> dict[str, Any] | None:
        lines = cluster.access_log()[-1:]
        return lines[0] if lines and lines[0]["path"] == path else None

    return await eventually(look)


# --- losing parts of it --------------------------------------------------------------------------


async def test_workers_and_pods_may_go() -> None:
    # One cluster for all of it: starting one takes seconds.
    async with (
        open_cluster(workers=2, MILLSTREAM_LEASE_S="3") as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=20) as http,
    ):
        await _worker_goes(cluster, http)
        await _pod_goes(cluster, http)
        await _all_pods_go(cluster, http)


async def _worker_goes(cluster: ComposeCluster, http: httpx.AsyncClient) -> None:
    """SIGTERM: exit code 0 within the grace, and its tasks go on elsewhere without a gap."""
    streams = [await native.submit(http, tokens=30, rate=20) for _ in range(4)]
    readers = [asyncio.create_task(native.read(http, task_id)) for task_id in streams]
    await asyncio.sleep(0.5)
    assert await cluster.named("worker")[0].stop() == 0
    for frames in await asyncio.gather(*readers):
        sse.check_native(frames)
        assert frames[-1].event == "completed"
        assert len(sse.native_text(frames).split()) == 30


async def _pod_goes(cluster: ComposeCluster, http: httpx.AsyncClient) -> None:
    """SIGTERM of one pod under load: the other takes over, and no request is lost (B66)."""
    statuses: list[int] = []
    done = False

    async def load() -> None:
        while not done:
            answer = await http.post("/v1/chat/completions", json=chat())
            statuses.append(answer.status_code)

    clients = [asyncio.create_task(load()) for _ in range(4)]
    await asyncio.sleep(0.5)
    assert await cluster.named("api")[0].stop() == 0
    await asyncio.sleep(0.5)
    done = True
    await asyncio.gather(*clients)
    assert len(statuses) > 50
    assert statuses.count(200) == len(statuses), Counter(statuses)


async def _all_pods_go(cluster: ComposeCluster, http: httpx.AsyncClient) -> None:
    """The gateway's own error is one that clients parse, and says when to come back."""
    (pod,) = cluster.named("api")
    assert await pod.stop() == 0
    answer = await http.post("/v1/chat/completions", json=chat())
    assert answer.status_code == 502
    assert answer.json()["error"]["type"] == "server_error"
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["access-control-allow-origin"] == "*"
    assert answer.headers["content-type"] == "application/json"


class StubPod:
    """A pod that reads a request and hangs up without an answer, or answers what it was sent."""

    def __init__(self, *, answers: bool) -> None:
        self.answers = answers
        self.requests: list[str] = []
        self.address = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["StubPod"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            if length := re.search(r"(?i)content-length: (\d+)", head):
                await reader.readexactly(int(length[1]))
            if self.answers:
                body = json.dumps(head.split("\r\n")).encode()
                size = f"content-length: {len(body)}\r\n"
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n" + size.encode() + b"\r\n")
                writer.write(body)
                await writer.drain()
        finally:
            writer.close()


async def test_a_post_is_never_sent_twice() -> None:
    """What a pod has read may have become a task; what it refused to take has not."""
    broken, sound = StubPod(answers=False), StubPod(answers=True)
    async with (
        ComposeCluster() as cluster,
        broken.listening(),
        sound.listening(),
    ):
        await cluster.start_nginx([broken.address, sound.address])
        async with httpx.AsyncClient(base_url=cluster.url) as http:
            posts = [await http.post("/tasks", json={}) for _ in range(10)]
            assert [p.status_code for p in posts].count(502) == 5
            assert [p.status_code for p in posts].count(200) == 5
            assert len(broken.requests) + len(sound.requests) == 10
            # A question may be asked again.
            gets = [await http.get("/tasks/x") for _ in range(10)]
            assert {g.status_code for g in gets} == {200}


async def test_a_pod_that_refuses_costs_nothing() -> None:
    sound = StubPod(answers=True)
    async with StubPod(answers=True).listening() as gone:
        pass
    async with ComposeCluster() as cluster, sound.listening():
        await cluster.start_nginx([gone.address, sound.address])
        async with httpx.AsyncClient(base_url=cluster.url) as http:
            posts = [await http.post("/tasks", json={}) for _ in range(10)]
        assert {p.status_code for p in posts} == {200}
        assert len(sound.requests) == 10


async def test_the_pod_learns_who_asks_and_how() -> None:
    async with StubPod(answers=True).listening() as pod, ComposeCluster() as cluster:
        await cluster.start_nginx([pod.address])
        async with httpx.AsyncClient(base_url=cluster.url) as http:
            seen = (await http.get("/x", headers={"x-forwarded-for": "203.0.113.9"})).json()
            tls = (await http.get("/x", headers={"x-forwarded-proto": "https"})).json()
        host = cluster.url.removeprefix("http://")
        assert seen[0] == "GET /x HTTP/1.1"
        assert f"Host: {host}" in seen
        assert f"X-Forwarded-Host: {host}" in seen
        assert "X-Forwarded-For: 203.0.113.9, 127.0.0.1" in seen
        assert "X-Forwarded-Proto: http" in seen
        assert "X-Forwarded-Proto: https" in tls
        assert not any(line.lower().startswith("connection:") for line in seen)


async def test_nginx_runs_without_privileges() -> None:
    async with ComposeCluster() as cluster:
        nginx = await cluster.start_nginx(["127.0.0.1:9"])
        status = f"/proc/{nginx.popen.pid}/status"
        with open(status) as file:  # noqa: ASYNC230
            uids = re.search(r"Uid:\s+(\d+)\s+(\d+)", file.read())
        assert uids is not None
        assert "0" not in uids.groups() or os.geteuid() != 0
        assert "[alert]" not in nginx.text()
        assert "[emerg]" not in nginx.text()
        assert await nginx.stop() == 0
