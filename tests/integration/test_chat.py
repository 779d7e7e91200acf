"""Chat completions through a real pod, Valkey and worker, as the official client sees them."""

import asyncio
import json
from functools import partial

import httpx
import openai
import pytest
from tests.support import sse
from tests.support.link import Way
from tests.support.local_fleet import LocalFleet
from tests.support.waiting import eventually

from millstream.fleet.chaos.link import Link

pytestmark = pytest.mark.asyncio(loop_scope="module")


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def directed(prompt: str = "hello", **directive: object) -> list[dict[str, str]]:
    return ask(f"@fake {json.dumps(directive)}\n{prompt}")


async def test_stream_and_whole_give_the_same_text(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="fake", messages=directed(tokens=40))
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="fake",
            messages=directed(tokens=40),
            stream=True,
            stream_options={"include_usage": True},
        )
    ]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert len(text.split()) == 40
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 40
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    # role, 40 tokens, finish, usage
    assert len(chunks) == 43
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_wire_is_strict_sse(shared_fleet: LocalFleet) -> None:
    async with httpx.AsyncClient(base_url=shared_fleet.url) as http:
        answer = await http.post(
            "/v1/chat/completions", json={"messages": directed(tokens=3), "stream": True}
        )
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-store, no-transform"
    assert answer.headers["x-accel-buffering"] == "no"
    frames = sse.parse(answer.text)
    assert frames[0].comments == ["ok"]
    assert all(frame.id is None and frame.event == "message" for frame in frames)
    assert answer.headers["x-task-id"] in frames[0].json["id"]
    assert len(sse.chat_text(frames).split()) == 3


async def test_an_old_client_gets_a_stream_without_chunks(shared_fleet: LocalFleet) -> None:
    host, port = shared_fleet.url.removeprefix("http://").split(":")
    body = json.dumps({"messages": directed(tokens=3), "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + body)
    async with asyncio.timeout(20):
        head, _, text = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    assert "transfer-encoding" not in head.lower()
    frames = sse.parse(text)
    assert frames[-1].data == "[DONE]"
    assert len(sse.chat_text(frames).split()) == 3


async def test_max_tokens_is_a_length_finish(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="fake", messages=ask("x"), max_tokens=7)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_string_across_tokens(client: openai.AsyncOpenAI, stream: bool) -> None:
    arguments = {
        "model": "fake",
        "messages": directed(texts=["he", "llo", " wor", "ld", " and more"]),
        "stop": ["lo w"],
    }
    if stream:
        deltas = [
            chunk.choices[0]
            async for chunk in await client.chat.completions.create(**arguments, stream=True)
        ]
        text = "".join(delta.delta.content or "" for delta in deltas)
        reason = deltas[-1].finish_reason
    else:
        choice = (await client.chat.completions.create(**arguments)).choices[0]
        text, reason = choice.message.content, choice.finish_reason
    assert (text, reason) == ("hel", "stop")


async def test_text_held_back_for_a_stop_string_comes_at_the_end(
    client: openai.AsyncOpenAI,
) -> None:
    answer = await client.chat.completions.create(
        model="fake", messages=directed(texts=["he", "llo", " wo"]), stop="lo world"
    )
    assert answer.choices[0].message.content == "hello wo"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_bytes_of_an_emoji_are_joined(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="fake", messages=directed(bytes=["e6", "97a5", "f0", "9f", "98", "80", "0a"])
    )
    assert answer.choices[0].message.content == "日😀\n"


async def test_keepalives_flow_before_the_first_token(shared_fleet: LocalFleet) -> None:
    async with httpx.AsyncClient(base_url=shared_fleet.url) as http:
        answer = await http.post(
            "/v1/chat/completions",
            json={"messages": directed(tokens=2, delay_s=1.8), "stream": True},
        )
    frames = sse.parse(answer.text)
    comments = [comment for frame in frames for comment in frame.comments]
    assert comments.count("ping") >= 2
    assert len(sse.chat_text(frames).split()) == 2
    # A blank line after a comment would end an event for the openai client.
    assert ": ping\n\n" not in answer.text


async def test_the_official_client_waits_through_silence(client: openai.AsyncOpenAI) -> None:
    """A keepalive that ends in a blank line would be JSON to it (openai-python#2722, B67)."""
    stream = await client.chat.completions.create(
        model="fake", messages=directed(tokens=2, delay_s=1.6), stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len("".join(c.choices[0].delta.content or "" for c in chunks).split()) == 2


async def test_the_official_client_raises_what_a_stream_tells(client: openai.AsyncOpenAI) -> None:
    """Only an error in `data:` reaches it (openai-python#2796, B68)."""
    stream = await client.chat.completions.create(
        model="fake", messages=directed(tokens=9, rate=20, error_at=6), stream=True
    )
    texts: list[str] = []

    async def read_on() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")
            assert chunk.choices[0].finish_reason is None

    with pytest.raises(openai.APIError) as told:
        await read_on()
    assert told.value.code == "max_attempts"
    assert len("".join(texts).split()) == 5


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
    ],
)
async def test_usage_comes_once_and_only_if_asked_for(
    shared_fleet: LocalFleet, options: dict[str, bool] | None, counted: bool
) -> None:
    body = {"messages": directed(tokens=6), "stream": True}
    if options is not None:
        body["stream_options"] = options
    async with httpx.AsyncClient(base_url=shared_fleet.url) as http:
        answer = await http.post("/v1/chat/completions", json=body)
        chunks = [frame.json for frame in sse.parse(answer.text)[:-1]]
        usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        assert len(usages) == counted
        assert [chunk["choices"] for chunk in chunks if not chunk["choices"]] == [[]] * counted
        log = await shared_fleet.redis.xrange("{ms:0}:log:" + answer.headers["x-task-id"])
        tokens = sum(fields[b"k"] == b"t" for _, fields in log)
        assert [usage["completion_tokens"] for usage in usages] == [tokens] * counted


async def test_a_retry_of_the_official_client_makes_no_second_task(
    shared_fleet: LocalFleet,
) -> None:
    """The first answer is lost on its way, and the client asks again by itself (B83)."""
    redis = shared_fleet.redis
    before = {key async for key in redis.scan_iter("*:task:*")}
    port = int(shared_fleet.url.rpartition(":")[2])
    way = Way(partial(asyncio.open_connection, "127.0.0.1", port))
    async with (
        Link(way) as link,
        openai.AsyncOpenAI(
            base_url=f"{link.url.replace('redis', 'http')}/v1", api_key="none", max_retries=2
        ) as client,
    ):
        asking = asyncio.create_task(
            client.chat.completions.create(
                model="fake",
                messages=directed(tokens=20, rate=20),
                extra_headers={"Idempotency-Key": "asked twice"},
            )
        )

        async def new() -> set[bytes]:
            return {key async for key in redis.scan_iter("*:task:*")} - before

        (task,) = await eventually(new, what="the task")
        assert link.connections == 1
        link.reset()
        answer = await asking
        assert way.made == 2
    assert await new() == {task}
    assert task.decode().rpartition(":")[2] in answer.id
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20


async def test_sixteen_at_once_get_their_own_answers(client: openai.AsyncOpenAI) -> None:
    async def one(number: int) -> str | None:
        answer = await client.chat.completions.create(
            model="fake", messages=directed(f"canary {number} " * 5, echo=True)
        )
        return answer.choices[0].message.content

    answers = await asyncio.gather(*map(one, range(16)))
    assert answers == [f"canary {number} " * 5 for number in range(16)]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_stops_its_task(
    shared_fleet: LocalFleet, stream: bool
) -> None:
    async with httpx.AsyncClient(base_url=shared_fleet.url) as http:
        request = asyncio.create_task(
            http.post(
                "/v1/chat/completions",
                json={"messages": directed(tokens=100_000, rate=20), "stream": stream},
            )
        )

        async def entry() -> bytes | None:
            entries = await shared_fleet.redis.xrange("{ms:0}:queue:fake")
            return entries[0][1][b"task"] if entries else None

        task_id = (await eventually(entry, what="task")).decode()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await shared_fleet.quiet()
    state = await shared_fleet.redis.hget("{ms:0}:task:" + task_id, "state")
    assert state == b"cancelled"


async def test_a_key_brings_back_the_answer_of_a_lost_connection(shared_fleet: LocalFleet) -> None:
    body = {"messages": directed(tokens=20, rate=20)}
    key = {"Idempotency-Key": "lost on the way"}
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/v1/chat/completions", json=body, headers=key, timeout=0.5)
        again = await http.post("/v1/chat/completions", json=body, headers=key)
        assert again.status_code == 200
        assert again.json()["usage"]["completion_tokens"] == 20
        task = (await http.get(f"/tasks/{again.headers['x-task-id']}")).json()
        assert task["attempts"] == 1
