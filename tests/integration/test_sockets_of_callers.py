"""Who may open a WebSocket: by key, by ticket, and from which pages."""

import json

import httpx
import pytest
import pytest_asyncio
from tests.integration.test_sockets import chat_body, numbered, opened, rest, text_of
from tests.support.local_fleet import Api, LocalFleet
from tests.support.native import submit

ANN, BOB = "key-of-ann-0123456789", "key-of-bob-0123456789"

pytestmark = pytest.mark.asyncio(loop_scope="module")


def by(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keyed(shared_fleet: LocalFleet) -> Api:
    """A pod of the fleet that asks for keys; each has two streams."""
    keys = f"ann:{ANN},bob:{BOB}"
    return await shared_fleet.api(api_keys=keys, rate_limit_concurrent_streams=2)


async def test_a_key_in_the_header_opens_both(keyed: Api) -> None:
    async with opened(keyed.url, "/v1/chat/ws", additional_headers=by(ANN)) as socket:
        await socket.send(chat_body(texts=["a", "b"]))
        frames, code = await rest(socket)
    assert (text_of(frames), code) == ("ab", 1000)
    path = f"/tasks/{frames[0]['data']['task_id']}/ws"
    async with opened(keyed.url, path, additional_headers=by(ANN)) as socket:
        assert await rest(socket) == (numbered(frames), 1000)
    for headers, word in (
        (by(BOB), "task_not_found"),
        (by("wrong"), "invalid_api_key"),
        ({}, None),
    ):
        async with opened(keyed.url, path, additional_headers=headers) as socket:
            ((frame,), code) = await rest(socket)
        assert code == (4404 if word == "task_not_found" else 4401)
        assert frame["data"]["error"]["code"] == (word or "invalid_api_key")


async def test_a_ticket_opens_one_and_may_stop_its_task(keyed: Api) -> None:
    """What a page does: it fetches a ticket with its key, and connects without one."""
    async with httpx.AsyncClient(base_url=keyed.url, headers=by(ANN)) as http:
        task_id = await submit(http, tokens=100_000, rate=5)

        async def ticket() -> str:
            return (await http.post(f"/tasks/{task_id}/ticket")).json()["ticket"]

        path = f"/tasks/{task_id}/ws?ticket={await ticket()}"
        async with opened(keyed.url, path, origin="https://page.example") as socket:
            frames = [json.loads(await socket.recv()) for _ in range(3)]
            async with opened(keyed.url, path) as second:  # while the first is open, too
                ((refused,), code) = await rest(second)
            assert (code, refused["data"]["error"]["code"]) == (4401, "invalid_ticket")
        assert text_of(frames)
        last = numbered(frames)[-1]["id"]
        unused = await ticket()
        for other in (f"/tasks/t0-{'a' * 26}/ws", "/v1/chat/ws"):
            async with opened(keyed.url, f"{other}?ticket={unused}") as socket:
                ((refused,), code) = await rest(socket)
            assert code == 4401
        path = f"/tasks/{task_id}/ws?ticket={unused}&last_event_id={last}"
        async with opened(keyed.url, path) as socket:
            await socket.send('{"type": "stop"}')
            frames, code = await rest(socket)
        assert (numbered(frames)[0]["id"], frames[-1]["event"], code) == (
            last + 1,
            "cancelled",
            1000,
        )
        assert (await http.get(f"/tasks/{task_id}")).json()["status"] == "cancelled"
    assert unused not in keyed.text()  # its log


async def test_a_socket_counts_as_a_stream(keyed: Api) -> None:
    async with httpx.AsyncClient(base_url=keyed.url, headers=by(BOB)) as http:
        # Slow, so that what nobody takes does not hold the closing of a socket up.
        task_id = await submit(http, tokens=100_000, rate=2)
        path = f"/tasks/{task_id}/ws"
        async with (
            opened(keyed.url, path, additional_headers=by(BOB)) as one,
            opened(keyed.url, path, additional_headers=by(BOB)) as two,
        ):
            await one.recv()
            await two.recv()
            for third in (path, "/v1/chat/ws"):
                async with opened(keyed.url, third, additional_headers=by(BOB)) as socket:
                    if third != path:
                        await socket.send(chat_body(tokens=1))
                    ((frame,), code) = await rest(socket)
                assert (code, frame["data"]["error"]["code"]) == (1013, "rate_limit_exceeded")
                assert frame["data"]["retry_after_s"] >= 1
        await http.delete(f"/tasks/{task_id}")


async def test_strange_pages_open_none_without_keys(shared_fleet: LocalFleet) -> None:
    """Any page can connect to this machine, and a browser does not ask before it does."""
    async with httpx.AsyncClient(base_url=shared_fleet.url) as http:
        task_id = await submit(http, texts=["mine"])
    for path in (f"/tasks/{task_id}/ws", "/v1/chat/ws"):
        for origin in ("https://evil.example", "null"):
            async with opened(shared_fleet.url, path, origin=origin) as socket:
                ((frame,), code) = await rest(socket)
            assert (code, frame["data"]["error"]["code"]) == (4403, "origin_not_allowed")
        rebound = shared_fleet.url.replace("127.0.0.1", "evil.example")
        async with opened(rebound, path, host="127.0.0.1") as socket:
            frames, code = await rest(socket)
        assert (code, frames[0]["data"]["error"]["code"]) == (4403, "host_not_allowed")
    url = f"/tasks/{task_id}/ws"
    async with opened(shared_fleet.url, url, origin="http://localhost:3000") as socket:
        frames, code = await rest(socket)
    assert (text_of(frames), code) == ("mine", 1000)
