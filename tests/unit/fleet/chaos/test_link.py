"""The proxy before Redis: a plain wire, and its three troubles."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from millstream.fleet.chaos.link import Link


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[Link]:
    """A link to a server that sends everything back."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    path = tmp_path / "s"
    async with (
        await asyncio.start_unix_server(echo, path),
        Link(partial(asyncio.open_unix_connection, path)) as made,
    ):
        yield made


async def connect(link: Link) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(link.url)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def test_it_passes_everything_on(link: Link) -> None:
    reader, writer = await connect(link)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    assert link.connections == 1
    assert link.healthy
    writer.close()


async def test_what_is_held_back_comes_later(link: Link) -> None:
    reader, writer = await connect(link)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    link.silence()
    assert not link.healthy
    writer.write(b"two")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readexactly(3), 0.1)
    link.heal()
    assert await reader.readexactly(3) == b"two"
    writer.close()


async def test_a_slow_link_is_slow_both_ways(link: Link) -> None:
    link.slow_down(0.1)
    reader, writer = await connect(link)
    begun_at = time.monotonic()
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    assert time.monotonic() - begun_at >= 0.2
    writer.close()


async def test_a_reset_cuts_what_there_is_and_lets_new_ones_in(link: Link) -> None:
    reader, writer = await connect(link)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    link.reset()
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(3)
    writer.close()
    reader, writer = await connect(link)
    writer.write(b"two")
    assert await reader.readexactly(3) == b"two"
    writer.close()
