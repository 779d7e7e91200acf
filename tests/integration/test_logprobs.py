"""Log probabilities and what goes by them: told once, and the same to everyone ever after."""

import asyncio
import json
import math
import signal
from typing import Any

import httpx
import openai
import pytest
from tests.support import sse
from tests.support.local_fleet import LocalFleet

pytestmark = pytest.mark.asyncio(loop_scope="module")


def directed(prompt: str = "hello", **directive: object) -> str:
    return f"@fake {json.dumps(directive)}\n{prompt}"


def chat(prompt: str = "hello", **directive: object) -> dict[str, Any]:
    content = directed(prompt, **directive)
    return {"model": "fake", "messages": [{"role": "user", "content": content}]}


async def test_whole_and_streamed_tell_the_same(client: openai.AsyncOpenAI) -> None:
    asked = {**chat(tokens=12), "logprobs": True, "top_logprobs": 3}
    whole = (await client.chat.completions.create(**asked)).choices[0]
    assert whole.logprobs is not None
    told = whole.logprobs.content or []
    assert len(told) == 12
    assert "".join(token.token for token in told) == whole.message.content
    for token in told:
        assert token.bytes == list(token.token.encode())
        assert -3 < token.logprob <= 0
        assert len(token.top_logprobs) == 3
        values = [other.logprob for other in token.top_logprobs]
        assert values == sorted(values, reverse=True)
    chunks = [c async for c in await client.chat.completions.create(**asked, stream=True)]
    streamed = [
        token
        for chunk in chunks
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == told
    plain = (await client.chat.completions.create(**chat(tokens=12))).choices[0]
    assert plain.logprobs is None
    assert plain.message.content == whole.message.content
    bare = (await client.chat.completions.create(**chat(tokens=12), logprobs=True)).choices[0]
    assert bare.logprobs is not None
    assert [token.top_logprobs for token in bare.logprobs.content or []] == [[]] * 12


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_cuts_text_and_logprobs_alike(
    client: openai.AsyncOpenAI, stream: bool
) -> None:
    """Its first letter is the last of a token, so this token is cut as well."""
    texts = ["one ", "two ", "thre", "e STO", "P", " four"]
    asked = {**chat(texts=texts, tokens=6), "stop": ["STOP"], "logprobs": True}
    if stream:
        chunks = [c async for c in await client.chat.completions.create(**asked, stream=True)]
        choices = [chunk.choices[0] for chunk in chunks]
        text = "".join(choice.delta.content or "" for choice in choices)
        told = [t for choice in choices if choice.logprobs for t in choice.logprobs.content or []]
    else:
        choice = (await client.chat.completions.create(**asked)).choices[0]
        assert choice.logprobs is not None
        text, told = choice.message.content, choice.logprobs.content or []
    assert text == "one two three "
    assert [token.token for token in told] == ["one ", "two ", "thre", "e "]
    assert [bytes(token.bytes or []).decode() for token in told] == ["one ", "two ", "thre", "e "]


async def test_the_sync_client_reads_them_with_several_choices(shared_fleet: LocalFleet) -> None:
    def ask() -> None:
        with openai.OpenAI(base_url=f"{shared_fleet.url}/v1", api_key="x") as client:
            asked = {**chat(tokens=5), "n": 2, "seed": 3, "logprobs": True, "top_logprobs": 0}
            whole = client.chat.completions.create(**asked)
            told: list[list[Any]] = [[], []]
            for chunk in client.chat.completions.create(**asked, stream=True):
                (choice,) = chunk.choices
                if choice.logprobs:
                    told[choice.index] += choice.logprobs.content or []
        assert told == [choice.logprobs.content for choice in whole.choices if choice.logprobs]
        assert told[0] != told[1]

    await asyncio.to_thread(ask)


async def test_pieces_of_a_character_have_their_bytes(client: openai.AsyncOpenAI) -> None:
    asked = chat(bytes=["e697", "a5", "f09f9880", "ff"])
    answer = await client.chat.completions.create(**asked, logprobs=True)
    choice = answer.choices[0]
    told = (choice.logprobs and choice.logprobs.content) or []
    assert choice.message.content == "日😀\ufffd"
    assert [token.bytes for token in told] == [[0xE6, 0x97], [0xA5], [*"😀".encode()], [0xFF]]
    assert [token.token for token in told] == [
        r"bytes:\xe6\x97",
        r"bytes:\xa5",
        "😀",
        r"bytes:\xff",
    ]
    stream = await client.chat.completions.create(**asked, logprobs=True, stream=True)
    texts, counts = [], []
    async for chunk in stream:
        if chunk.choices[0].logprobs:
            texts.append(chunk.choices[0].delta.content)
            counts.append(len(chunk.choices[0].logprobs.content or []))
    assert texts == ["", "日", "😀", "\ufffd"]  # a token without text tells its log probability too
    assert counts == [1] * 4


async def test_native_events_carry_them_only_if_asked(http: httpx.AsyncClient) -> None:
    async def events(**fields: object) -> list[sse.Frame]:
        body = {"prompt": directed(tokens=3, probs=[0.5, 0.25]), **fields}
        made = (await http.post("/tasks", json=body)).json()
        return sse.parse((await http.get(made["stream_url"])).text)

    plain, asked = await events(), await events(logprobs=True, top_logprobs=1)
    assert [set(frame.json) for frame in plain if frame.event == "token"] == [{"text", "n"}] * 3
    told = [frame.json for frame in asked if frame.event == "token"]
    assert [set(data) for data in told] == [{"text", "n", "logprobs"}] * 3
    assert [data["logprobs"][0]["logprob"] for data in told] == [-0.693147, -1.386294, -0.693147]
    assert all(data["logprobs"][0]["token"] == data["text"] for data in told)
    assert all(len(data["logprobs"][0]["top_logprobs"]) == 1 for data in told)


async def test_early_stop_goes_by_the_mean_of_the_last_tokens(http: httpx.AsyncClient) -> None:
    probs = [0.9, 0.2, 0.9, 0.9, 0.4, 0.1, 0.9]  # means of three: .67 .67 .73 .47
    prompt = {"tokens": 7, "probs": probs}
    stop = {"early_stop": {"min_prob": 0.5, "window": 3}}
    whole = (await http.post("/v1/chat/completions", json=chat(**prompt))).json()
    words = whole["choices"][0]["message"]["content"].split()
    made = (await http.post("/tasks", json={**chat(**prompt), **stop})).json()
    frames = sse.parse((await http.get(made["stream_url"])).text)
    assert frames[-1].json["finish_reason"] == "low_confidence"
    assert frames[-1].json["usage"]["completion_tokens"] == 6
    assert sse.native_text(frames).split() == words[:6]
    task = (await http.get(f"/tasks/{made['task_id']}")).json()
    assert (task["status"], task["finish_reason"]) == ("completed", "low_confidence")
    assert task["text"].split() == words[:6]
    # OpenAI's clients know no such word, and were not asked to take log probabilities.
    for stream in (False, True):
        answer = await http.post(
            "/v1/chat/completions", json={**chat(**prompt), **stop, "stream": stream}
        )
        if stream:
            chunks = [frame.json for frame in sse.parse(answer.text)[:-1]]
            assert sse.chat_text(sse.parse(answer.text)).split() == words[:6]
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
            assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks)
        else:
            choice = answer.json()["choices"][0]
            assert choice["finish_reason"] == "stop"
            assert choice["message"]["content"].split() == words[:6]
            assert choice["logprobs"] is None
    easy = {"early_stop": {"min_prob": 0.4, "window": 3}}
    answer = (await http.post("/v1/chat/completions", json={**chat(**prompt), **easy})).json()
    assert answer["usage"]["completion_tokens"] == 7


async def test_what_cannot_be_served_is_named(http: httpx.AsyncClient) -> None:
    cases = [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"logit_bias": {"1": True}}, "logit_bias.1"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"early_stop": {"min_prob": 0.5}}, "early_stop.window"),
        ({"early_stop": {"min_prob": 0, "window": 1}}, "early_stop.min_prob"),
        ({"early_stop": {"min_prob": 0.5, "window": 100_000}}, "early_stop.window"),
        ({"early_stop": {"min_prob": 0.5, "window": 2, "mean": 1}}, "early_stop.mean"),
    ]
    for fields, param in cases:
        for path in ("/v1/chat/completions", "/tasks"):
            answer = await http.post(path, json={**chat(tokens=1), **fields})
            assert answer.status_code == 400, fields
            assert answer.json()["error"]["param"] == param, fields
    # Which ids there are only the worker knows.
    for stream in (False, True):
        body = {**chat(tokens=1), "logit_bias": {"5": 1}, "stream": stream}
        answer = await http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")


async def test_a_takeover_changes_no_byte(redis_url: str, tmp_path) -> None:
    async with LocalFleet(redis_url, tmp_path) as fleet:
        api = await fleet.api(keepalive_s=0.5)
        await fleet.worker()
        await fleet.worker()
        # The mean of the last four falls under 0.25 with the 30th token, on the second worker.
        probs = [0.9 - 0.02 * at for at in range(28)] + [0.01] * 12
        asked = {
            **chat(tokens=40, rate=40, probs=probs),
            "logprobs": True,
            "top_logprobs": 4,
            "early_stop": {"min_prob": 0.25, "window": 4},
        }
        assert [math.fsum(probs[at - 3 : at + 1]) / 4 < 0.25 for at in (28, 29)] == [False, True]
        async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:

            async def read(task: dict[str, Any], kill_at: int | None) -> list[str]:
                lines: list[str] = []
                async with http.stream("GET", task["stream_url"]) as answer:
                    async for frame in sse.frames(answer.aiter_lines()):
                        if frame.event in ("token", "completed"):
                            lines.append(f"{frame.id} {frame.data}")
                        if len(lines) == kill_at:
                            owner = await fleet.owner(task["task_id"])
                            owner.signal(signal.SIGKILL)
                            kill_at = None
                return lines

            undisturbed = (await http.post("/tasks", json=asked)).json()
            expected = await read(undisturbed, None)
            assert len(expected) == 31
            assert json.loads(expected[-1].partition(" ")[2])["finish_reason"] == "low_confidence"
            task = (await http.post("/tasks", json=asked)).json()
            assert await read(task, 15) == expected
            assert (await http.get(f"/tasks/{task['task_id']}")).json()["attempts"] == 2
            again = await http.get(task["stream_url"], headers={"Last-Event-ID": "10"})
            frames = [frame for frame in sse.parse(again.text) if frame.data]
            assert [f"{frame.id} {frame.data}" for frame in frames] == expected[10:]
        await fleet.quiet()
