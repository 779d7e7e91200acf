"""What clients do with a connection: leave, say no more, send ahead, or send what is no HTTP."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio
from fastapi import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from tests.support.bounded_http import eventually_no_tasks, served
from uvicorn.server import ServerState

from millstream.api.event_stream import EventStream
from millstream.api.streams import client_gone

GARBAGE = b"nonsense\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class House:
    """`/quiet` streams and falls silent, `/long` waits for its client, else the body comes back."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.left: list[str] = []
        self.somebody_left = asyncio.Event()
        self.begun: list[str] = []
        self.headers: list[dict[str, str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self.begun.append(path)
        if path == "/quiet":
            stream = EventStream(self._quiet(), send_timeout_s=20)
            await stream(scope, receive, send)
            return
        request = Request(scope, receive, send)
        body = await request.body()
        self.headers.append(dict(request.headers))
        if path == "/long":
            await client_gone(request)
            self._miss(path)
        elif path == "/slow":
            await self.go_on.wait()
        await PlainTextResponse(path.encode() + b" " + body)(scope, receive, send)

    async def _quiet(self) -> AsyncGenerator[bytes]:
        try:
            yield b"one"
            await self.go_on.wait()
            yield b"two"
        except asyncio.CancelledError:
            self._miss("/quiet")
            raise

    def _miss(self, path: str) -> None:
        self.left.append(path)
        self.somebody_left.set()


def ask(path: str, body: bytes = b"", version: str = "1.1") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.fixture
def house() -> House:
    return House()


@pytest_asyncio.fixture
async def state(house: House) -> AsyncIterator[tuple[int, ServerState]]:
    async with served(house) as server:
        yield server


@pytest_asyncio.fixture
async def streams(state: tuple[int, ServerState]) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", state[0])
    async with asyncio.timeout(20):
        yield reader, writer
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()


async def body_of(reader: asyncio.StreamReader) -> bytes:
    """The next answer's body, which has a length."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head
    return await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))


@pytest.mark.parametrize(("version", "frame"), [("1.0", b"one"), ("1.1", b"3\r\none\r\n")])
async def test_a_stream_is_chunked_for_those_who_know_chunks(
    house: House, streams: Streams, version: str, frame: bytes
) -> None:
    reader, writer = streams
    writer.write(ask("/quiet", version=version))
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert await reader.readexactly(len(frame)) == frame
    assert (b"transfer-encoding: chunked" in head) == (version == "1.1")
    assert (b"connection: close" in head) == (version == "1.0")
    if version == "1.0":
        house.go_on.set()
        assert await reader.read() == b"two"


async def test_an_old_stream_that_is_cut_does_not_look_whole(
    state: tuple[int, ServerState], streams: Streams
) -> None:
    reader, writer = streams
    writer.write(ask("/quiet", version="1.0"))
    await reader.readuntil(b"one")
    for task in state[1].tasks:
        task.cancel()
    with pytest.raises(ConnectionResetError):
        await reader.read()


async def test_who_says_no_more_is_answered(house: House, streams: Streams) -> None:
    reader, writer = streams
    writer.write(ask("/slow", b"a"))
    writer.write(ask("/fast", b"b"))
    writer.write(b"POST /never HTTP/1.1\r\nContent-Length: 9\r\n\r\nhalf")
    writer.write_eof()
    await asyncio.sleep(0.05)  # whatever order they are seen in, this is to come after
    house.go_on.set()
    assert await body_of(reader) == b"/slow a"
    assert await body_of(reader) == b"/fast b"
    assert await reader.read() == b""


@pytest.mark.parametrize(
    ("path", "ahead"),
    [("/quiet", "a body")]  # which `/long` reads
    + [(p, a) for p in ("/quiet", "/long") for a in ("at once", "later", "much", "nothing")],
)
@pytest.mark.parametrize("half", [True, False])
async def test_a_client_that_leaves_is_missed_at_once(
    house: House,
    state: tuple[int, ServerState],
    streams: Streams,
    *,
    path: str,
    ahead: str,
    half: bool,
) -> None:
    reader, writer = streams
    more = {"much": 60_000, "a body": 150_000}.get(ahead, 0)
    if ahead == "a body":
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {more + 1}\r\n\r\n"
        writer.write(head.encode())
    else:
        writer.write(ask(path) + (ask("/fast") if ahead == "at once" else b""))
    if path == "/quiet":
        await reader.readuntil(b"one\r\n")
    if ahead == "later":
        writer.write(ask("/fast"))
    elif ahead == "much":
        writer.write(ask("/fast", b"x" * more))
    elif ahead == "a body":
        writer.write(b"x" * more)
    await writer.drain()
    if half:
        writer.write_eof()
    else:
        writer.close()
    await house.somebody_left.wait()
    assert house.left == [path]
    if not half:
        await eventually_no_tasks(state[1])
        assert house.begun == [path]


async def test_what_is_sent_ahead_is_answered_in_its_turn(house: House, streams: Streams) -> None:
    reader, writer = streams
    writer.write(ask("/quiet") + ask("/fast", b"1") + ask("/fast")[:20])
    await reader.readuntil(b"one\r\n")
    writer.write(ask("/fast")[20:] + ask("/slow", b"x" * 300_000))
    writer.write(ask("/fast", b"4") + GARBAGE + ask("/never"))
    house.go_on.set()
    await reader.readuntil(b"0\r\n\r\n")
    assert await body_of(reader) == b"/fast 1"
    assert await body_of(reader) == b"/fast "
    assert await body_of(reader) == b"/slow " + b"x" * 300_000
    assert await body_of(reader) == b"/fast 4"
    assert (await reader.read()).startswith(b"HTTP/1.1 400 Bad Request")
    assert "/never" not in house.begun


async def test_what_is_wrong_with_the_next_request_does_not_swallow_an_answer(
    house: House, streams: Streams
) -> None:
    reader, writer = streams
    writer.write(ask("/slow", b"a") + GARBAGE)
    await asyncio.sleep(0)
    house.go_on.set()
    assert await body_of(reader) == b"/slow a"
    assert (await reader.read()).startswith(b"HTTP/1.1 400 Bad Request")


async def test_a_connection_at_work_is_not_upgraded(house: House, streams: Streams) -> None:
    reader, writer = streams
    upgrade = b"GET /ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    writer.write(ask("/slow", b"a") + upgrade)
    house.go_on.set()
    assert await body_of(reader) == b"/slow a"
    assert (await reader.read()).startswith(b"HTTP/1.1 400 Bad Request")


@pytest.mark.parametrize("wrapped", [b"x" * 100_000, b"X: y\r\n" * 20_000, b"1;" + b"e" * 100_000])
async def test_what_a_body_is_wrapped_in_has_a_bound(streams: Streams, wrapped: bytes) -> None:
    reader, writer = streams
    head = b"POST /fast HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    last = b"" if wrapped.startswith(b"1;") else b"0\r\n"
    writer.write(head + b"1\r\na\r\n" * 50_000 + last + wrapped)
    assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")


async def test_trailers_are_not_headers(house: House, streams: Streams) -> None:
    reader, writer = streams
    head = b"POST /fast HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head + b"1\r\na\r\n0\r\nAuthorization: other\r\n\r\n")
    assert await body_of(reader) == b"/fast a"
    assert house.headers == [{"host": "x", "transfer-encoding": "chunked"}]


async def test_a_flood_sent_ahead_is_not_parsed_ahead(
    house: House, state: tuple[int, ServerState], streams: Streams
) -> None:
    reader, writer = streams
    writer.write(ask("/quiet") + b"GET /fast HTTP/1.1\r\n\r\n" * 2_000)
    await reader.readuntil(b"one\r\n")
    (connection,) = state[1].connections
    assert len(connection.pipeline) < 500
    house.go_on.set()
    for _ in range(2_000):
        await reader.readuntil(b"/fast ")
    assert len(house.begun) == 2_001


@pytest.mark.parametrize("offer", ["h2c", "websocket"])
async def test_an_offer_that_is_declined_costs_no_body(streams: Streams, offer: str) -> None:
    """Java's HttpClient offers HTTP/2 with each request; httptools then passes over its body."""
    reader, writer = streams
    wanted = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {offer}\r\nHTTP2-Settings: AA\r\n"
    head = f"POST /fast HTTP/1.1\r\nHost: x\r\n{wanted}Content-Length: 3\r\n\r\n".encode()
    for _ in range(2):
        writer.write(head)
        await asyncio.sleep(0.05)
        writer.write(b"abc" + head + b"def" + ask("/fast", b"ghi"))
        for body in (b"abc", b"def", b"ghi"):
            assert await body_of(reader) == b"/fast " + body


async def test_a_broken_body_does_not_write_into_its_own_answer(streams: Streams) -> None:
    reader, writer = streams
    writer.write(b"POST /quiet HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    await reader.readuntil(b"one\r\n")
    writer.write(b"no chunk\r\n")
    with pytest.raises(ConnectionResetError):
        await reader.read()
