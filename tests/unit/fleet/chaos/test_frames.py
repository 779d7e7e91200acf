"""The strict reader of streams."""

from collections.abc import AsyncIterator

import pytest

from millstream.fleet.frames import Frame, MalformedStream, read_frame, read_frames


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def test_frames_come_whole_however_they_are_cut() -> None:
    text = ': ok\n\nid: 1\nevent: token\ndata: {"text": "é\u2028"}\n\nid: 2\nda'.encode()
    for at in range(len(text)):
        frames = [frame async for frame in read_frames(pieces(text[:at], text[at:]))]
        assert frames == [Frame(), Frame("1", "token", '{"text": "é\u2028"}')]


@pytest.mark.parametrize("block", [b"data: \xc3", b"dat: x", b"data", b"id: 1\nid: 2"])
def test_what_is_no_stream_is_an_error(block: bytes) -> None:
    with pytest.raises(MalformedStream):
        read_frame(block)
