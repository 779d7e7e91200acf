"""Event streams on the server as the pod runs it: what they keep, and how they end."""

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.support.bounded_http import eventually_no_tasks, served

from millstream.api.event_stream import EventStream, Shortcut, Unfinished
from millstream.api.silence import Silence
from millstream.api.wire import WIRE
from millstream.shared.events import Event

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def app_of(
    content: Callable[[], AsyncGenerator[bytes]], *shortcuts: Shortcut, send_timeout_s: float = 20
) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(content(), *shortcuts, send_timeout_s=send_timeout_s)
        await stream(scope, receive, send)

    return app


async def test_a_stream_keeps_nothing_of_its_request() -> None:
    class Baggage(dict[str, Any]):
        pass

    over: list[str] = []
    baggage: list[weakref.ref[Baggage]] = []

    async def content() -> AsyncGenerator[bytes]:
        yield b"one"
        await asyncio.Event().wait()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = Baggage()
        baggage.append(weakref.ref(scope["state"]))
        scope["extensions"][WIRE].when_over(lambda: over.append("over"))
        await app_of(content)(scope, receive, send)

    async with served(app) as (port, state):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert await reader.readuntil(b"one\r\n") == b"3\r\none\r\n"
        gc.collect()
        assert baggage[0]() is None
        assert not over
        writer.close()
        await eventually_no_tasks(state)
        assert over == ["over"]


async def test_a_client_that_goes_away_ends_the_stream_whatever_swallows_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended: list[str] = []

    async def content() -> AsyncGenerator[bytes]:
        try:
            yield b"one"
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append("swallowed")
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    async with served(app_of(content)) as (port, state):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD)
        await reader.readuntil(b"one\r\n")
        writer.close()
        await eventually_no_tasks(state)
    assert ended == ["swallowed", "ended"]
    assert not caplog.records


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_client_that_takes_nothing_and_a_request_that_is_cancelled_are_cut(
    cancelled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def content() -> AsyncGenerator[bytes]:
        yield b"one"
        while not cancelled:
            yield b"x" * 65_536
        await asyncio.Event().wait()

    async with served(app_of(content, send_timeout_s=0.2)) as (port, state):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, HEAD)
            assert await loop.sock_recv(client, 1)
            if cancelled:
                for task in state.tasks:
                    task.cancel()
            await eventually_no_tasks(state)

            async def read_on() -> None:
                while await loop.sock_recv(client, 2**20):
                    pass

            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(read_on(), 10)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_content_that_cannot_go_on_does_not_look_whole() -> None:
    async def content() -> AsyncGenerator[bytes]:
        yield b"one"
        raise Unfinished

    async with served(app_of(content)) as (port, state):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        await eventually_no_tasks(state)


async def test_a_stream_ends_as_a_response_does_and_the_connection_lives_on() -> None:
    """Nothing to say is nothing sent: an empty chunk would end the body, and the end that follows
    would stand before the next answer."""

    async def content() -> AsyncGenerator[bytes]:
        yield b"one"
        yield b""

    async with served(app_of(content)) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(HEAD)
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(13) == b"3\r\none\r\n0\r\n\r\n"
        writer.close()


async def test_a_shortcut_waits_for_the_first_frame_and_leaves_the_end_to_the_loop() -> None:
    shortcut = Shortcut(lambda events: "".join(event.data for event in events), Silence(15, 15))
    token, end = Event(1, "t", "1", "direct"), Event(2, "completed", "", "{}")
    taken: list[bool] = []
    go_on = asyncio.Event()

    async def content() -> AsyncGenerator[bytes]:
        taken.append(shortcut([token]))
        yield b"one"
        taken.append(shortcut([token]))
        taken.append(shortcut([token, end]))
        yield b"two"
        await go_on.wait()

    async with served(app_of(content, shortcut)) as (port, state):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD)
        body = (await reader.readuntil(b"two\r\n")).partition(b"\r\n\r\n")[2]
        assert body == b"3\r\none\r\n6\r\ndirect\r\n3\r\ntwo\r\n"
        assert taken == [False, True, False]
        go_on.set()
        writer.close()
        await eventually_no_tasks(state)
    assert not shortcut([token])
