"""What a chaos client makes of a response's stream: numbers of the log, ends, and what is wrong."""

import httpx2
import pytest
from tests.unit.api.test_response_events import ENDS, USAGE, log, stream

from millstream.fleet.chaos.history import Connection
from millstream.fleet.chaos.response_stream import read_response
from millstream.fleet.frames import MalformedStream


async def read(text: str, after: int = 0) -> Connection:
    connection = Connection(after)
    await read_response(connection, httpx2.Response(200, content=text.encode()))
    return connection


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("texts", [[], ["a", "", "b"]])
async def test_it_sees_what_the_log_has(end: str, texts: list[str]) -> None:
    events = log(texts, end)
    connection = await read(stream(events, background=True))
    seen = [(seen.seq, seen.kind, seen.data) for seen in connection.seen]
    last = "" if end == "failed" else events[-1].data
    assert seen == [
        *((number, "token", text) for number, text in enumerate(texts, 1)),
        (len(events), events[-1].kind, last),
    ]
    assert connection.done
    reason = {"completed": "stop", "incomplete": "length"}.get(end)
    assert (connection.finish_reason, connection.usage) == (
        reason,
        None if end == "failed" else USAGE,
    )


async def test_a_resumed_stream_begins_with_the_next_number() -> None:
    events = log(["a", "b", "c"], "completed")
    rest = stream(events, background=True, after=5)
    assert [seen.seq for seen in (await read(rest, after=1)).seen] == [2, 3, 4]
    with pytest.raises(MalformedStream):
        await read(rest, after=2)
    with pytest.raises(MalformedStream):
        await read(rest)


async def test_a_gap_and_a_repeat_are_found() -> None:
    blocks = stream(log(["a", "b"], "completed"), background=True).split("\n\n")
    for bad in (blocks[:5] + blocks[6:], blocks[:6] + blocks[5:]):
        with pytest.raises(MalformedStream):
            await read("\n\n".join(bad))


async def test_an_error_is_no_end() -> None:
    text = stream([], background=True) + 'event: error\ndata: {"error": {"code": "x"}}\n\n'
    connection = await read(text)
    assert (connection.error, connection.done, connection.seen) == ("x", False, [])
