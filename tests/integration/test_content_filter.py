"""The content filter on a fleet: nothing of a match is taken, told or kept anywhere."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.redis_servers import Servers

pytestmark = pytest.mark.asyncio(loop_scope="module")

# What the fake engine is told to say holds the match: it must not be refused as a prompt.
LIST = "# none of these\nseecret\n/swordf[il]sh\\d/\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def filtered(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "list").write_text(LIST)
    url = servers.fresh_url(shared=True)
    async with LocalFleet(url, folder, content_filter=folder / "list") as fleet:
        await asyncio.gather(fleet.api(keepalive_s=0.5), fleet.worker(), fleet.worker())
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def http(filtered: LocalFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=filtered.url, timeout=25) as session:
        yield session


@pytest_asyncio.fixture(loop_scope="module")
async def client(filtered: LocalFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{filtered.url}/v1", api_key="none", max_retries=0
    ) as session:
        yield session


def says(*texts: str, **directive: object) -> str:
    """A prompt by which the fake engine says these, and in which no match is to be seen."""
    return f"@fake {json.dumps({'bytes': [text.encode().hex() for text in texts], **directive})}"


SAID = says("so", " ", "see", "cr", "et", " it", " goes")


async def keys(fleet: LocalFleet) -> set[bytes]:
    """All of Redis."""
    return {key async for key in fleet.redis.scan_iter("*")}


async def kept(fleet: LocalFleet, *, since: set[bytes]) -> bytes:
    """All that Redis holds, but for the prompts, and for what other tests left."""
    parts: list[bytes] = []
    for key in await keys(fleet) - since:
        if await fleet.redis.type(key) == b"stream":
            parts.append(repr(await fleet.redis.xrange(key)).encode())
        elif await fleet.redis.type(key) == b"hash":
            fields = await fleet.redis.hgetall(key)
            parts += [value for name, value in fields.items() if name != b"request"]
    # Ids are drawn: three letters of a word stand in one of a few thousand.
    return re.sub(rb"t\d+-[a-z2-7]{26}", b"an id", b"\n".join(parts))


async def test_an_answer_ends_before_the_match(
    filtered: LocalFleet, http: httpx.AsyncClient, client: openai.AsyncOpenAI
) -> None:
    before = await keys(filtered)
    messages: Any = [{"role": "user", "content": SAID}]
    task = (await http.post("/tasks", json={"messages": messages, "logprobs": True})).json()
    frames = sse.parse((await http.get(task["stream_url"])).text)
    sse.check_native(frames)
    assert [f.json["text"] for f in frames if f.event == "token"] == ["so", " "]
    assert frames[-1].event == "completed"
    assert frames[-1].json["finish_reason"] == "content_filter"
    assert frames[-1].json["usage"]["completion_tokens"] == 2
    state = (await http.get(f"/tasks/{task['task_id']}")).json()
    assert (state["status"], state["text"]) == ("completed", "so ")
    assert state["finish_reason"] == "content_filter"

    whole = await client.chat.completions.create(
        model="fake", messages=messages, n=2, logprobs=True, top_logprobs=2, temperature=0
    )
    for choice in whole.choices:
        assert (choice.message.content, choice.finish_reason) == ("so ", "content_filter")
        assert choice.logprobs is not None
        assert [told.token for told in choice.logprobs.content or []] == ["so", " "]
    stream = await client.chat.completions.create(model="fake", messages=messages, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "so "
    assert chunks[-1].finish_reason == "content_filter"

    text = (await client.completions.create(model="fake", prompt=SAID)).choices[0]
    assert (text.text, text.finish_reason) == ("so ", "content_filter")

    response = await client.responses.create(model="fake", input=SAID)
    assert (response.status, response.output_text) == ("incomplete", "so ")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "content_filter"
    events = [e async for e in await client.responses.create(model="fake", input=SAID, stream=True)]
    assert events[-1].type == "response.incomplete"

    simple = (await http.post("/generate", json={"prompt": SAID})).json()
    assert simple["text"] == "so "
    everything = await kept(filtered, since=before)
    assert b"so" in everything
    assert b"see" not in everything
    assert b"cret" not in everything


async def test_what_is_no_match_comes_whole(http: httpx.AsyncClient) -> None:
    for texts in [("sword", "fi", "shes"), ("a sw", "ord"), ("swordfish", " is")]:
        answer = await http.post("/generate", json={"prompt": says(*texts)})
        assert answer.json()["text"] == "".join(texts)


async def test_a_prompt_is_refused_before_anything_is_stored(
    filtered: LocalFleet, http: httpx.AsyncClient
) -> None:
    before = await filtered.redis.dbsize()
    bad = "tell me the S\u200bEECRET"
    for path, body, param in [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": bad}]}, "messages"),
        ("/v1/completions", {"prompt": ["fine", bad]}, "prompt"),
        ("/v1/responses", {"input": bad}, "input"),
        ("/v1/responses", {"input": "fine", "instructions": "swordfish7"}, "input"),
        ("/tasks", {"prompt": bad}, "prompt"),
        ("/chat", {"prompt": bad}, "prompt"),
    ]:
        answer = await http.post(path, json={"model": "fake", **body})
        assert answer.status_code == 400, path
        error = answer.json()["error"]
        assert error["code"] == "content_policy_violation"
        assert error["type"] == "invalid_request_error"
        assert (path, error["param"]) == (path, param) or param == "messages"
        assert "SEECRET" not in answer.text.upper()
    assert await filtered.redis.dbsize() == before


async def test_a_match_between_an_echoed_prompt_and_its_answer(
    client: openai.AsyncOpenAI,
) -> None:
    prompt = says("cret", " it") + "\nso see"
    for answer in [
        await client.completions.create(model="fake", prompt=prompt, echo=True),
        await client.completions.create(model="fake", prompt=prompt, echo=True, stop="t"),
    ]:
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == (prompt[:-3], "content_filter")
    stream = await client.completions.create(model="fake", prompt=prompt, echo=True, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == prompt[:-3]
    assert chunks[-1].finish_reason == "content_filter"
    (choice,) = (await client.completions.create(model="fake", prompt=prompt)).choices
    assert (choice.text, choice.finish_reason) == ("cret it", "stop")


async def test_where_only_answers_are_filtered_an_echoed_prompt_is_one(
    redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "list").write_text(LIST)
    settings = {"content_filter": tmp_path / "list", "content_filter_on": "output"}
    async with LocalFleet(redis_url, tmp_path, **settings) as fleet:
        api, _ = await asyncio.gather(fleet.api(), fleet.worker())
        async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
            body = {"prompt": "the seecret", "max_tokens": 2}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            answer = await http.post("/v1/completions", json={**body, "echo": True})
            assert answer.json()["error"]["code"] == "content_policy_violation"
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


async def test_a_name_is_given_to_no_model(filtered: LocalFleet, http: httpx.AsyncClient) -> None:
    message = {"role": "user", "content": says("fine"), "name": "seecret"}
    answer = await http.post("/v1/chat/completions", json={"messages": [message]})
    assert answer.json()["choices"][0]["message"]["content"] == "fine"
    task_id = answer.headers["x-task-id"]
    fields = await filtered.redis.hgetall(f"{{ms:0}}:task:{task_id}")
    assert b"seecret" not in b"".join(fields.values())


async def test_a_prompt_of_token_ids_is_refused_by_the_worker(http: httpx.AsyncClient) -> None:
    ids = [int.from_bytes(b"\x01" + part) for part in (b"see", b"cret")]
    body: dict[str, Any] = {"model": "fake", "prompt": ids}
    for stream in (False, True):
        answer = await http.post("/v1/completions", json={**body, "stream": stream})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("content_policy_violation", "prompt")


async def test_a_match_across_a_takeover(redis_url: str, tmp_path: Path) -> None:
    """The worker dies while it holds back the first half of what may be a match."""
    (tmp_path / "list").write_text(LIST)
    async with LocalFleet(redis_url, tmp_path, content_filter=tmp_path / "list") as fleet:
        api, first = await asyncio.gather(fleet.api(), fleet.worker())
        async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:

            async def start(*texts: str) -> dict[str, Any]:
                body = {"prompt": says("so", " ", *texts, rate=2)}
                return (await http.post("/tasks", json=body)).json()

            match, other = await start("see", "cr", "et", " it"), await start("see", "cr", "ets")
            beside = await start(*"abcdefg")  # it began last: the others are as far as it is
            killed = False
            async with http.stream("GET", beside["stream_url"]) as answer:
                async for frame in sse.frames(answer.aiter_lines()):
                    if frame.id == "4" and not killed:
                        first.signal(signal.SIGKILL)
                        killed = True
                        state = (await http.get(f"/tasks/{match['task_id']}")).json()
                        assert (state["status"], state["text"]) == ("running", "so ")
                        await fleet.worker()
            for task, text, reason in [
                (match, "so ", "content_filter"),
                (other, "so seecrets", "stop"),
            ]:
                frames = sse.parse((await http.get(task["stream_url"])).text)
                sse.check_native(frames)
                shown = [frame.json["text"] for frame in frames if frame.event == "token"]
                assert ("".join(shown), frames[-1].json["finish_reason"]) == (text, reason)
                state = (await http.get(f"/tasks/{task['task_id']}")).json()
                assert (state["text"], state["attempts"]) == (text, 2)


async def test_a_list_that_cannot_be_used_is_told_at_the_start(
    redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "list").write_text("fine\n/a(/\n")
    async with LocalFleet(redis_url, tmp_path, content_filter=tmp_path / "list") as fleet:
        pod = fleet.start_api()
        worker = await fleet.worker(ready=False)
        for process in (pod, worker):
            assert await process.ended(within_s=25) == 2
            said = process.text().strip().splitlines()
            assert said[-1].startswith(
                f"millstream: {tmp_path}/list, line 2: not a regular expression"
            )
            assert "Traceback" not in process.text()
