"""What streams see of nginx before the pods: spacing, silence, sockets, HTTP/2, restarts."""

import asyncio
import itertools
import json
import os
import ssl
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tests.support import native, sse
from tests.support.callers import Caller, load
from tests.support.compose_cluster import ComposeCluster
from tests.support.faults import prompt
from tests.support.waiting import eventually
from websockets.asyncio.client import connect

ROLLING_S = float(os.environ.get("EDGE_ROLLING_S", "3"))
RATE = float(os.environ.get("EDGE_ROLLING_RPS", "20"))
# A minute beyond the usual limit: a machine without nginx installs it first.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(ROLLING_S + 90)]
NO_KEEPALIVE = httpx.Limits(max_keepalive_connections=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[ComposeCluster]:
    """Two pods and a worker behind the nginx of the profile `tls`."""
    variables = {"MILLSTREAM_ENGINE": "fake", "MILLSTREAM_KEEPALIVE_S": "0.2"}
    async with ComposeCluster(**variables) as started:
        yield await started.up(nginx="nginx-tls")


def secure(cluster: ComposeCluster) -> httpx.AsyncClient:
    """A client of HTTP/2 that trusts nothing but the front door's certificate."""
    door = cluster.doors[0]
    trust = ssl.create_default_context(cafile=door.certificate)
    return httpx.AsyncClient(base_url=door.tls_url, verify=trust, http2=True, timeout=20)


def chat(*, stream: bool = True, **directive: object) -> dict[str, Any]:
    content = f"@fake {json.dumps(directive)}\nhello"
    return {"messages": [{"role": "user", "content": content}], "stream": stream}


async def test_tokens_are_spaced_as_the_pod_sends_them(cluster: ComposeCluster) -> None:
    """benchmarks/through_nginx.py has the figures; the bounds here are those of a busy machine."""
    pod = cluster.named("api")[0].environment["MILLSTREAM_PORT"]
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{pod}", timeout=20) as direct,
        httpx.AsyncClient(base_url=cluster.url, timeout=20) as proxied,
        secure(cluster) as encrypted,
    ):
        ways = [direct, proxied, encrypted]
        jobs = (native.token_times(way, tokens=60, rate=40) for way in ways)
        measured = [
            [later - earlier for earlier, later in itertools.pairwise(times)]
            for times in await asyncio.gather(*jobs)
        ]
    medians = [statistics.median(times) for times in measured]
    assert max(medians) < 2 * medians[0], medians
    # Held back, most would come together and a few late.
    for times in measured:
        assert sum(times) > 0.8 * 59 / 40
        assert sum(gap > 0.005 for gap in times) > 20, times


async def test_a_silence_is_bridged_by_keepalives(cluster: ComposeCluster) -> None:
    """A proxy that gives up after a second, and a task that says nothing for two."""
    pods = [f"127.0.0.1:{pod.environment['MILLSTREAM_PORT']}" for pod in cluster.named("api")]
    impatient = {"proxy_read_timeout 3600s": "proxy_read_timeout 1s"}
    nginx = await cluster.start_nginx(pods, changes=impatient)
    async with httpx.AsyncClient(base_url=cluster.doors[-1].url, timeout=20) as http:
        body = chat(tokens=3, delay_s=2)
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            text = "".join([part async for part in answer.aiter_text()])
    assert sse.chat_text(sse.parse(text))
    assert text.count(": ping\n") >= 3
    assert await nginx.stop() == 0


async def test_websockets_are_passed_on(cluster: ComposeCluster) -> None:
    trust = ssl.create_default_context(cafile=cluster.doors[0].certificate)
    for base, context in ((cluster.url, None), (cluster.doors[0].tls_url, trust)):
        url = base.replace("http", "ws", 1)
        async with (
            asyncio.timeout(20),
            connect(f"{url}/v1/chat/ws", proxy=None, ssl=context) as socket,
        ):
            await socket.send(json.dumps(chat(tokens=5)))
            frames = [json.loads(message) async for message in socket]
        assert [frame["id"] for frame in frames if "id" in frame] == [1, 2, 3, 4, 5, 6]
        # Another pod's turn, and the rest of the same events.
        task_id = frames[0]["data"]["task_id"]
        path = f"{url}/tasks/{task_id}/ws?last_event_id=3"
        async with asyncio.timeout(20), connect(path, proxy=None, ssl=context) as socket:
            again = [json.loads(message) async for message in socket]
        assert [frame for frame in again if "id" in frame] == frames[-3:]


async def test_many_streams_share_one_connection_of_http2(cluster: ComposeCluster) -> None:
    async with secure(cluster) as http:
        first = await http.get("/health")
        assert first.http_version == "HTTP/2"

        async def one(number: int) -> tuple[str, str]:
            body = chat(tokens=20, rate=40) | {"seed": number}
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                text = "".join([part async for part in answer.aiter_text()])
            connection = answer.extensions["network_stream"].get_extra_info("client_addr")
            assert answer.http_version == "HTTP/2"
            return sse.chat_text(sse.parse(text)), connection

        answers = await asyncio.gather(*(one(number) for number in range(20)))
    assert len({text for text, _ in answers}) == 20
    assert len({connection for _, connection in answers}) == 1


async def test_an_event_source_goes_on_over_http2(cluster: ComposeCluster) -> None:
    async with secure(cluster) as http:
        task_id = await native.submit(http, tokens=30, rate=60)
        frames: list[sse.Frame] = []
        while not frames or frames[-1].event == "token":
            headers = {"Accept": "text/event-stream", "Last-Event-ID": str(len(frames))}
            url = f"/tasks/{task_id}/stream"
            async with http.stream("GET", url, headers=headers) as answer:
                news = sse.frames(answer.aiter_lines())
                had = len(frames)
                async for frame in news:
                    if frame.event != "queued":
                        frames.append(frame)
                    if len(frames) == had + 7:
                        break
        sse.check_native(frames)

        async def pods() -> set[str]:
            lines = [line for line in cluster.access_log() if task_id in line["path"]]
            return {line["pod"] for line in lines} if len(lines) >= 4 else set()

        assert len(await eventually(pods)) == 2


@pytest.mark.parametrize("path", ["/fleet", "/fleet.json", "/metrics", "/%6detrics", "//fleet"])
async def test_the_fleet_is_shown_to_operators_alone(cluster: ComposeCluster, path: str) -> None:
    async with secure(cluster) as encrypted, httpx.AsyncClient() as plain:
        for http, url in ((plain, cluster.url), (encrypted, cluster.doors[0].tls_url)):
            answer = await http.get(f"{url}{path}", headers={"x-forwarded-port": "8081"})
            assert answer.status_code == 404
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["error"]["code"] == "not_found"
            assert "operators" in answer.text
        if path in ("/fleet", "/fleet.json"):
            assert (await plain.get(f"{cluster.doors[0].operators_url}{path}")).status_code == 200


# --- a new version --------------------------------------------------------------------------------


async def test_a_restart_of_both_pods_loses_nothing(cluster: ComposeCluster) -> None:
    """20 requests a second, of three kinds. EDGE_ROLLING_S=120 is the long form."""
    tokens, restarts = 30, 0
    text = prompt(tokens=tokens, rate=40)
    done: list[int] = []
    async with httpx.AsyncClient(timeout=20, limits=NO_KEEPALIVE) as http:
        caller = Caller(http, [cluster.url])

        async def ask(number: int) -> None:
            await caller.asks(number, text, tokens=tokens)
            done.append(number)

        async with load(ask, rate=RATE) as asked:
            until = time.monotonic() + ROLLING_S
            while time.monotonic() < until or restarts < 2:
                # The oldest one goes, and a new one comes at its address.
                pod = cluster.named("api")[0]
                assert await pod.stop() == 0
                await cluster.start_api(int(pod.environment["MILLSTREAM_PORT"]))
                restarts += 1
    assert sorted(done) == asked
    assert len(asked) >= RATE * ROLLING_S / 2
    assert caller.reconnects > 0, "no stream was open on a pod that went"
