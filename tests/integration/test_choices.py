"""Several choices of one answer: each is a task, and all of them are taken, or none is."""

import asyncio
import json
import signal

import httpx
import openai
import pytest
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


def body(n: int, prompt: str = "hello", seed: int | None = 7, **directive: object) -> dict:
    content = f"@fake {json.dumps(directive)}\n{prompt}"
    sent = {"model": "fake", "messages": [{"role": "user", "content": content}], "n": n}
    return sent if seed is None else {**sent, "seed": seed}


async def tasks(fleet: LocalFleet) -> set[str]:
    found = [key async for key in fleet.redis.scan_iter("*:task:*")]
    return {key.decode().rpartition(":")[2] for key in found}


async def test_choices_differ_and_come_again(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**body(3, tokens=20))
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in whole.choices] == ["stop"] * 3
    assert len(set(texts)) == 3
    again = await client.chat.completions.create(**body(3, tokens=20))
    assert [choice.message.content for choice in again.choices] == texts
    # One choice is the first of several.
    one = await client.chat.completions.create(**body(1, tokens=20))
    assert one.choices[0].message.content == texts[0]
    assert whole.usage is not None
    assert one.usage is not None
    assert whole.usage.prompt_tokens == one.usage.prompt_tokens
    assert whole.usage.completion_tokens == 60
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 60
    unseeded = await client.chat.completions.create(**body(3, seed=None, tokens=20))
    # The fake engine draws nothing without a seed.
    assert len({choice.message.content for choice in unseeded.choices}) == 1


async def test_a_stream_carries_all_choices(
    client: openai.AsyncOpenAI, shared_fleet: LocalFleet
) -> None:
    whole = await client.chat.completions.create(**body(4, tokens=30, rate=200))
    stream = await client.chat.completions.create(
        **body(4, tokens=30, rate=200), stream=True, stream_options={"include_usage": True}
    )
    texts, reasons, turns = [""] * 4, [[] for _ in range(4)], []
    chunks = [chunk async for chunk in stream]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        assert not reasons[choice.index]  # nothing after the end of a choice
        texts[choice.index] += choice.delta.content or ""
        turns.append(choice.index)
        if choice.finish_reason:
            reasons[choice.index].append(choice.finish_reason)
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [["stop"]] * 4
    assert turns[:4] == [0, 1, 2, 3]  # who speaks
    assert turns[4:] != sorted(turns[4:])  # they come as they are made
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    (answer_id,) = {chunk.id for chunk in chunks}
    assert answer_id.removeprefix("chatcmpl-") in await tasks(shared_fleet)


async def test_the_sync_client_reads_them_too(shared_fleet: LocalFleet) -> None:
    def ask() -> tuple[list[str], list[str]]:
        with openai.OpenAI(base_url=f"{shared_fleet.url}/v1", api_key="x") as client:
            whole = client.chat.completions.create(**body(2, tokens=9))
            texts = ["", ""]
            for chunk in client.chat.completions.create(**body(2, tokens=9), stream=True):
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        return [choice.message.content or "" for choice in whole.choices], texts

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed
    assert len(set(whole)) == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_stops_all(shared_fleet: LocalFleet, stream: bool) -> None:
    before = await tasks(shared_fleet)
    async with httpx.AsyncClient(base_url=shared_fleet.url) as http:
        sent = {**body(3, tokens=100_000, rate=20), "stream": stream}
        request = asyncio.create_task(http.post("/v1/chat/completions", json=sent))

        async def three() -> set[str]:
            new = await tasks(shared_fleet) - before
            return new if len(new) == 3 else set()

        made = await eventually(three, what="three tasks")
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await shared_fleet.quiet()
    for task_id in made:
        assert await shared_fleet.redis.hget("{ms:0}:task:" + task_id, "state") == b"cancelled"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_choice_that_is_stopped_ends_the_answer(
    shared_fleet: LocalFleet, stream: bool
) -> None:
    before = await tasks(shared_fleet)
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as http:
        sent = {**body(2, tokens=100_000, rate=20), "stream": stream}
        request = asyncio.create_task(http.post("/v1/chat/completions", json=sent))

        async def two() -> set[str]:
            new = await tasks(shared_fleet) - before
            return new if len(new) == 2 else set()

        made = await eventually(two, what="two tasks")
        await http.post(f"/tasks/{made.pop()}/stop")
        answer = await request
    if stream:
        frames = sse.parse(answer.text)
        assert frames[-1].json["error"]["code"] == "cancelled"
        assert not any('"finish_reason":"' in frame.data for frame in frames)
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "cancelled")
    await shared_fleet.quiet()  # the other one too


async def test_the_same_key_finds_the_same_choices(shared_fleet: LocalFleet) -> None:
    before = await tasks(shared_fleet)
    key = {"Idempotency-Key": "three of them"}
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as http:
        sent = body(3, tokens=20, rate=20)
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/v1/chat/completions", json=sent, headers=key, timeout=0.5)
        again = (await http.post("/v1/chat/completions", json=sent, headers=key)).json()
        third = (await http.post("/v1/chat/completions", json=sent, headers=key)).json()
        other = await http.post("/v1/chat/completions", json={**sent, "n": 2}, headers=key)
    assert len(again["choices"]) == 3
    assert again["choices"] == third["choices"]
    assert again["usage"]["completion_tokens"] == 60
    assert other.status_code == 409
    assert len(await tasks(shared_fleet) - before) == 3


async def test_a_prompt_the_worker_refuses_is_a_400_for_all(shared_fleet: LocalFleet) -> None:
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as http:
        for stream in (True, False):
            sent = {**body(3, tokens=-1), "stream": stream}
            answer = await http.post("/v1/chat/completions", json=sent)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    await shared_fleet.quiet()


async def test_all_or_none_is_taken(redis_url: str, tmp_path) -> None:
    async with LocalFleet(redis_url, tmp_path) as fleet:
        api = await fleet.api(max_queue=5, model="fake")
        async with httpx.AsyncClient(base_url=api.url, timeout=20) as http:
            for _ in range(3):
                assert (await http.post("/tasks", json={"prompt": "x"})).status_code == 202
            full = await http.post("/v1/chat/completions", json={**body(3), "stream": True})
            assert (full.status_code, full.json()["error"]["code"]) == (503, "queue_full")
            assert int(full.headers["Retry-After"]) >= 1
            assert len(await tasks(fleet)) == 3
            never = await http.post("/v1/chat/completions", json=body(6))
            assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
            assert len(await tasks(fleet)) == 3


async def test_every_choice_survives_its_worker(redis_url: str, tmp_path) -> None:
    async with LocalFleet(redis_url, tmp_path) as fleet:
        api = await fleet.api(keepalive_s=0.5)
        await fleet.worker()
        sent = body(3, tokens=40, rate=40)
        async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
            whole = (await http.post("/v1/chat/completions", json=sent)).json()
            second = await fleet.worker()
            texts = ["", "", ""]
            async with http.stream(
                "POST", "/v1/chat/completions", json={**sent, "stream": True}
            ) as answer:
                count = 0
                async for frame in sse.frames(answer.aiter_lines()):
                    if frame.data == "[DONE]":
                        break
                    choice = frame.json["choices"][0]
                    texts[choice["index"]] += choice["delta"].get("content", "")
                    count += 1
                    if count == 30:
                        owner = await fleet.owner(answer.headers["x-task-id"])
                        owner.signal(signal.SIGKILL)
            assert texts == [choice["message"]["content"] for choice in whole["choices"]]
            task = (await http.get(f"/tasks/{answer.headers['x-task-id']}")).json()
            assert task["attempts"] == 2
            assert second.pid
        await fleet.quiet()
