"""Two callers on one fleet: what is one's does not exist for the other, on any route (I10)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tests.support import sse
from tests.support.all_routes import as_caller, ask, closed_routes, task_routes
from tests.support.local_fleet import Api, LocalFleet
from tests.support.native import submit
from tests.support.redis_servers import Servers
from tests.support.waiting import eventually

from millstream.shared.keys import Keys
from millstream.shared.schemas import new_task_id

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANN, BOB, ADMIN = ("key-of-ann-0123456789", "key-of-bob-0123456789", "key-of-admin-0123456789")
KEYS = f"ann:{ANN},bob:{BOB},admin:{ADMIN}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keyed(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalFleet]:
    """Two pods and a worker, for ann, bob and an administrator."""
    url = servers.fresh_url(shared=True)
    folder = tmp_path_factory.mktemp("fleet")
    async with LocalFleet(url, folder, api_keys=KEYS, keepalive_s=0.5) as fleet:
        await asyncio.gather(fleet.api(), fleet.api(), fleet.worker())
        yield fleet
        assert await fleet.keys_without_ttl() == []


@pytest_asyncio.fixture(loop_scope="module")
async def http(keyed: LocalFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=keyed.url, timeout=20) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def ann(keyed: LocalFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=keyed.url, headers=as_caller(ANN), timeout=20) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def bob(keyed: LocalFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=keyed.url, headers=as_caller(BOB), timeout=20) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), closed_routes())
async def test_every_route_wants_a_key(http: httpx.AsyncClient, method: str, path: str) -> None:
    """Before it looks at the body, and without a word on what would have come of it."""
    for headers, challenge, message in (
        ({}, "Bearer", "You didn't provide an API key"),
        ({"Authorization": "Basic YTpi"}, "Bearer", "You didn't provide an API key"),
        ({"Authorization": "Bearer"}, "Bearer", "You didn't provide an API key"),
        (as_caller("wrong"), 'Bearer error="invalid_token"', "Incorrect API key provided."),
        ({"X-API-Key": ANN}, "Bearer", "You didn't provide an API key"),
        ({"X-Forwarded-For": "127.0.0.1", "X-Real-IP": "::1"}, "Bearer", "You didn't provide"),
    ):
        answer = await ask(http, method, path, headers=headers, content=b'{"prompt": "')
        assert answer.status_code == 401, answer.text
        if method != "WEBSOCKET":
            assert answer.headers["www-authenticate"] == challenge
        if method != "HEAD":
            error = answer.json()["error"]
            assert error["message"].startswith(message)
            assert error["code"] == "invalid_api_key"
            assert error["type"] == "invalid_request_error"
            assert error["param"] is None


@pytest.mark.parametrize(("method", "path"), closed_routes())
async def test_a_key_in_a_url_is_refused(http: httpx.AsyncClient, method: str, path: str) -> None:
    for name in ("api_key", "key", "access_token", "x"):
        answer = await ask(http, method, path, params={name: ANN}, headers=as_caller(ANN))
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "key_in_url"
        assert ANN not in answer.text


async def test_health_and_preflights_need_none(http: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready"):
        assert (await http.get(path)).status_code == 200
    asks = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization"}  # fmt: skip
    answer = await http.options("/tasks", headers=asks)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "*"
    assert answer.headers["access-control-allow-headers"] == "authorization"
    # With keys, any page may ask: what it needs is a key.
    answer = await http.get("/v1/models", headers={**as_caller(ANN), "Origin": "https://x.example"})
    assert answer.status_code == 200


async def test_the_fleet_is_for_administrators(
    ann: httpx.AsyncClient, http: httpx.AsyncClient
) -> None:
    admin = as_caller(ADMIN)
    for path in (
        "/fleet.json",
        "/fleet/tasks?model=fake",
        "/usage?caller=*",
        "/usage?caller=key:bob",
    ):
        refused = await ann.get(path)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "not_allowed"
        assert (await http.get(path, headers=admin)).status_code == 200
    for path in ("/fleet/workers/x/drain", "/fleet/tasks/x/stop"):
        refused = await ann.post(path)
        assert refused.status_code == 403
        assert (await http.post(path, headers=admin)).status_code == 404
    assert (await ann.get("/usage?caller=key:ann")).status_code == 200
    for path in ("/", "/fleet", "/static/client.js"):
        assert (await http.get(path)).status_code == 200


async def hold(client: httpx.AsyncClient) -> str:
    """A task that runs until it is stopped."""
    task_id = await submit(client, tokens=100_000, rate=20)

    async def running() -> bool:
        return (await client.get(f"/tasks/{task_id}")).json()["status"] == "running"

    await eventually(running)
    return task_id


async def expired(fleet: LocalFleet, client: httpx.AsyncClient) -> str:
    """A task of which the tombstone is left."""
    task_id = await submit(client, tokens=1)

    async def done() -> bool:
        return (await client.get(f"/tasks/{task_id}")).json()["status"] == "completed"

    await eventually(done)
    shard = Keys(0)
    await fleet.redis.delete(shard.task(task_id))
    await fleet.redis.delete(shard.log(task_id))
    assert (await client.get(f"/tasks/{task_id}")).status_code == 410
    return task_id


def shape(answer: httpx.Response, task_id: str) -> tuple[int, str, dict[str, str]]:
    headers = {name: value for name, value in answer.headers.items() if name != "date"}
    return answer.status_code, answer.text.replace(task_id, "ID"), headers


def resuming(task_id: str) -> dict[str, str]:
    return {"Accept": "text/event-stream", "Last-Event-ID": f"{task_id}/1"}


async def test_a_foreign_task_is_an_unknown_task(
    keyed: LocalFleet, ann: httpx.AsyncClient, bob: httpx.AsyncClient
) -> None:
    """On every route, in every state: the same status, the same bytes, the same headers."""
    running, ended = await hold(ann), await submit(ann, tokens=3)
    gone = await expired(keyed, ann)
    response = (await ann.post("/v1/responses", json={"input": "x", "background": True})).json()
    stored = response["id"].removeprefix("resp_")
    try:
        for method, path in task_routes():
            if method == "HEAD":
                continue
            for foreign in (running, ended, gone, stored):
                unknown = new_task_id(0)
                theirs = shape(await ask(bob, method, path, task_id=foreign), foreign)
                nobodys = shape(await ask(bob, method, path, task_id=unknown), unknown)
                assert theirs == nobodys, (method, path)
                assert theirs[0] == 404, (method, path)
        # Nor can a conversation be gone on from that is another's.
        gone_on = [
            shape(await bob.post("/v1/responses", json=body), task_id)
            for task_id in (stored, new_task_id(0))
            for body in [{"input": "y", "previous_response_id": f"resp_{task_id}"}]
        ]
        assert gone_on[0] == gone_on[1]
        assert gone_on[0][0] == 400
        named = [
            shape(await bob.post("/v1/responses", json=body), task_id)
            for task_id in (stored, new_task_id(0))
            for body in [{"input": [{"type": "item_reference", "id": f"msg_{task_id}_0"}]}]
        ]
        assert named[0] == named[1]
        assert named[0][0] == 400
        for path in ("/chat", "/generate/stream"):  # these name the task in a header
            for foreign in (running, ended, gone):
                unknown = new_task_id(0)
                answers = [
                    shape(await bob.get(path, headers=resuming(task_id)), task_id)
                    for task_id in (foreign, unknown)
                ]
                assert answers[0] == answers[1], path
                assert answers[0][0] == 404
        assert (await ann.get(f"/tasks/{running}")).json()["status"] == "running"
        assert (await ann.get(f"/tasks/{ended}")).json()["status"] == "completed"
        # And what does exist for ann is no 404 for her, so the test above does compare something.
        assert (await ann.post(f"/tasks/{running}/ticket")).status_code == 201
        assert (await ann.get(f"/v1/responses/{response['id']}")).status_code == 200
    finally:
        stopped = await ann.post(f"/tasks/{running}/stop")
    assert stopped.json()["status"] == "cancelled"


async def test_one_key_of_idempotency_is_each_callers_own(
    ann: httpx.AsyncClient, bob: httpx.AsyncClient
) -> None:
    header = {"Idempotency-Key": "the-same"}
    mine = await ann.post("/tasks", json={"prompt": "a"}, headers=header)
    theirs = await bob.post("/tasks", json={"prompt": "b"}, headers=header)  # no 409: no trace
    assert (mine.status_code, theirs.status_code) == (202, 202)
    assert mine.json()["task_id"] != theirs.json()["task_id"]
    again = await ann.post("/tasks", json={"prompt": "a"}, headers=header)
    assert again.json()["task_id"] == mine.json()["task_id"]


async def test_no_byte_of_ann_reaches_bob(
    keyed: LocalFleet, ann: httpx.AsyncClient, bob: httpx.AsyncClient
) -> None:
    """Both stream at once on the same pods, and bob tries what he can meanwhile (I10)."""
    canary = "CANARY-7f3a"
    seen: list[bytes] = []
    other = next(process.url for process in keyed.processes[1:] if isinstance(process, Api))

    def prompt(word: str) -> dict[str, Any]:
        texts = ", ".join(f'"{word}-{number} "' for number in range(30))
        return {"prompt": f'@fake {{"texts": [{texts}], "rate": 200}}\n{word}'}

    async def anns(number: int) -> str:
        task_id = (await ann.post("/tasks", json=prompt(canary))).json()["task_id"]
        url = f"{(str(ann.base_url), other)[number % 2]}/tasks/{task_id}/stream"
        answer = await ann.get(url)
        text = sse.native_text(sse.parse(answer.text))
        assert text.count(canary) == 30
        return task_id

    async def bobs(number: int) -> None:
        task_id = (await bob.post("/tasks", json=prompt(f"bob{number}"))).json()["task_id"]
        answer = await bob.get(f"{(str(bob.base_url), other)[number % 2]}/tasks/{task_id}/stream")
        assert sse.native_text(sse.parse(answer.text)).count(f"bob{number}-") == 30
        seen.append(answer.content)

    async def tries(task_id: str) -> None:
        for method, path in task_routes():
            for name in (task_id, f"chatcmpl-{task_id}", f" {task_id}", f"{task_id}%00"):
                answer = await ask(bob, method, path, task_id=name)
                assert answer.status_code in (400, 404), answer.text
                seen.append(answer.content)

    done = await asyncio.gather(*map(anns, range(8)), *map(bobs, range(8)))
    await tries(next(task_id for task_id in done if task_id))
    others = ("/v1/models", "/health", "/ready", "/openapi.json")
    seen += [(await bob.get(path)).content for path in others]
    assert len(seen) > 20
    assert not any(canary.encode() in part for part in seen)


async def test_a_ticket_opens_one_stream_of_one_task_on_any_pod(
    keyed: LocalFleet, ann: httpx.AsyncClient, http: httpx.AsyncClient
) -> None:
    first, second = await submit(ann, tokens=5), await submit(ann, tokens=5)
    answer = await ann.post(f"/tasks/{first}/ticket")
    given = answer.json()
    assert answer.status_code == 201
    assert answer.headers["cache-control"] == "no-store"
    assert given == {
        "task_id": first,
        "ticket": given["ticket"],
        "expires_in_s": 60,
        "stream_url": f"/tasks/{first}/stream?ticket={given['ticket']}",
    }
    ticket = {"ticket": given["ticket"]}
    # For nothing else, and trying that does not use it up.
    for method, path in task_routes():
        refused = await ask(http, method, path, task_id=second, params=ticket)
        assert refused.status_code == 401, (method, path)
        if not path.endswith(("/stream", "/ws")):
            refused = await ask(http, method, path, task_id=first, params=ticket)
            assert refused.status_code == 401, (method, path)
    pods = [process.url for process in keyed.processes if isinstance(process, Api)]
    answers = await asyncio.gather(
        *(http.get(f"{pods[at % 2]}{given['stream_url']}") for at in range(40))
    )
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [200] + [401] * 39
    (stream,) = [answer for answer in answers if answer.status_code == 200]
    sse.check_native([frame for frame in sse.parse(stream.text) if frame.event != "queued"])
    refused = next(answer for answer in answers if answer.status_code == 401)
    assert refused.json()["error"]["code"] == "invalid_ticket"
    # With a new one a reader goes on where it was.
    given = (await ann.post(f"/tasks/{first}/ticket")).json()
    rest = await http.get(given["stream_url"] + "&last_event_id=3")
    sse.check_native(sse.parse(rest.text), first=4)


async def test_a_ticket_expires_and_redis_knows_only_its_hash(
    keyed: LocalFleet, ann: httpx.AsyncClient, http: httpx.AsyncClient
) -> None:
    task_id = await submit(ann, tokens=1)
    given = (await ann.post(f"/tasks/{task_id}/ticket")).json()
    key = Keys(0).ticket(task_id, given["ticket"])
    assert 50 < await keyed.redis.ttl(key) <= 60
    for name in [name async for name in keyed.redis.scan_iter("*")]:
        assert given["ticket"].encode() not in name
    assert given["ticket"].encode() not in await keyed.redis.get(key)
    await keyed.redis.expire(key, 0)
    answer = await http.get(given["stream_url"])
    assert answer.status_code == 401
    for strange in ("", "x", "x" * 5000, "é", "*"):
        answer = await http.get(f"/tasks/{task_id}/stream", params={"ticket": strange})
        assert answer.status_code == 401
        answer = await http.get("/tasks/nope/stream", params={"ticket": strange})
        assert answer.status_code == 401


async def test_the_security_headers_are_on_every_answer(
    ann: httpx.AsyncClient, http: httpx.AsyncClient
) -> None:
    task_id = await submit(ann, tokens=1)
    answers = [
        await http.get("/health"),
        await http.get("/nowhere"),
        await http.post("/tasks", content=b"{"),
        await ann.post("/tasks", content=b"{"),
        await ann.get(f"/tasks/{task_id}/stream"),
        await ann.post("/v1/chat/completions", json={"messages": [], "stream": True}),
        await http.get("/docs"),
        await http.options("/tasks", headers={"Origin": "https://x.example",
                                              "Access-Control-Request-Method": "POST"}),
    ]  # fmt: skip
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["content-security-policy"].startswith("default-src 'none';")
        assert answer.headers.get_list("cache-control")[0].startswith("no-store")
        assert len(answer.headers.get_list("cache-control")) == 1
        assert "server" not in answer.headers
