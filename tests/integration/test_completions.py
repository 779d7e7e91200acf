"""Text completions through a real pod, Valkey and worker, as the official client sees them."""

import json

import httpx
import openai
import pytest
from tests.support import sse
from tests.support.local_fleet import LocalFleet

from millstream.worker.engines.fake_script import FakeTokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")


def directed(prompt: str = "hello", **directive: object) -> str:
    return f"@fake {json.dumps(directive)}\n{prompt}"


async def test_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    asked = {"model": "fake", "prompt": directed(tokens=9)}
    whole = await client.completions.create(**asked)
    assert whole.object == "text_completion"
    assert whole.id.startswith("cmpl-t0-")
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].logprobs is None
    assert len(whole.choices[0].text.split()) == 9
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 9
    chunks = [
        chunk
        async for chunk in await client.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 9 + ["stop"]
    assert chunks[-1].usage == whole.usage
    assert [c.usage for c in chunks[:-1]] == [None] * 10


async def test_sixteen_tokens_by_default(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="fake", prompt="x")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_every_prompt_has_its_choices(client: openai.AsyncOpenAI, stream: bool) -> None:
    prompts = [directed(f"prompt {number}", tokens=4) for number in range(3)]
    alone = [
        (await client.completions.create(model="fake", prompt=prompt, n=2, seed=1))
        for prompt in prompts
    ]
    expected = [choice.text for answer in alone for choice in answer.choices]
    assert len(set(expected)) == 6
    asked = {"model": "fake", "prompt": prompts, "n": 2, "seed": 1}
    if stream:
        texts, usage = [""] * 6, None
        async for chunk in await client.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        answer = await client.completions.create(**asked)
        assert [choice.index for choice in answer.choices] == list(range(6))
        texts, usage = [choice.text for choice in answer.choices], answer.usage
    assert texts == expected
    assert usage is not None
    assert usage.completion_tokens == 24
    assert usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)


async def test_prompts_of_token_ids(client: openai.AsyncOpenAI) -> None:
    first, second = directed("one", tokens=3), directed("two", tokens=3)
    ids = [FakeTokenizer().encode("say"), FakeTokenizer().encode("more, please")]
    by_text = await client.completions.create(model="fake", prompt=["say", "more, please"])
    by_ids = await client.completions.create(model="fake", prompt=ids)
    assert [c.text for c in by_ids.choices] == [c.text for c in by_text.choices]
    assert by_ids.usage == by_text.usage
    one = await client.completions.create(model="fake", prompt=ids[0], echo=True)
    assert one.choices[0].text == "say" + by_text.choices[0].text
    echoed = await client.completions.create(model="fake", prompt=[first, second], echo=True)
    assert [choice.text.startswith(prompt) for choice, prompt in
            zip(echoed.choices, [first, second], strict=True)] == [True, True]  # fmt: skip
    assert echoed.usage is not None
    assert echoed.usage.completion_tokens == 6
    texts = ["", ""]
    async for chunk in await client.completions.create(
        model="fake", prompt=[first, second], echo=True, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in echoed.choices]


async def test_logprobs_in_this_forms_columns(client: openai.AsyncOpenAI) -> None:
    asked = {
        "model": "fake",
        "prompt": directed(texts=["he", "llo", " wo", "rld"], probs=[0.5]),
        "logprobs": 2,
        "stop": "world",
    }
    choice = (await client.completions.create(**asked)).choices[0]
    told = choice.logprobs
    assert choice.text == "hello "
    assert told is not None
    assert told.tokens == ["he", "llo", " "]  # as much of them as is text
    assert told.token_logprobs == [-0.693147] * 3
    assert told.text_offset == [0, 2, 5]
    assert [len(top) for top in told.top_logprobs or []] == [2, 2, 3]
    assert [top[token] for top, token in
            zip(told.top_logprobs or [], told.tokens, strict=True)] == [-0.693147] * 3  # fmt: skip
    columns: dict[str, list] = {"tokens": [], "text_offset": []}
    async for chunk in await client.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs:
            columns["tokens"] += chunk.choices[0].logprobs.tokens or []
            columns["text_offset"] += chunk.choices[0].logprobs.text_offset or []
    assert columns == {"tokens": told.tokens, "text_offset": told.text_offset}
    none = (await client.completions.create(**{**asked, "logprobs": 0})).choices[0].logprobs
    assert none is not None
    assert none.top_logprobs == [{token: -0.693147} for token in told.tokens]


async def test_what_cannot_be_served_is_named(shared_fleet: LocalFleet) -> None:
    cases = [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["x", 1]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [2**64 - 1]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": ["x"] * 33, "n": 2}, "n"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "logprobs": 6}, "logprobs"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "logprobs": 1, "echo": True}, "logprobs"),
        ({"prompt": "x", "top_logprobs": 1}, "top_logprobs"),
        ({"prompt": "x", "stream_options": {}}, "stream_options"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x" * 300_000}, "prompt"),
        ({"prompt": [7] * 300_000}, "prompt"),
        ({"prompt": ["x" * 99_000, "y" * 99_000, "z" * 99_000]}, "prompt"),
    ]
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as http:
        for body, param in cases:
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 400, body
            assert answer.json()["error"]["param"] == param, str(body)[:100]
        before = await shared_fleet.redis.dbsize()
        beyond = 2**57
        for body, param in [
            ({"prompt": [[257], [beyond]]}, "prompt"),
            ({"prompt": "x", "logit_bias": {str(beyond): 1}}, "logit_bias"),
        ]:
            answer = await http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert str(beyond - 1) in answer.json()["error"]["message"]
        assert await shared_fleet.redis.dbsize() == before
        # What is no token among those below the vocabulary's size, only this engine's worker knows.
        for stream in (False, True):
            body = {"prompt": [[7, 8], [9]], "stream": stream}
            answer = await http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    await shared_fleet.quiet()


async def test_the_wire_is_strict_sse(shared_fleet: LocalFleet) -> None:
    async with httpx.AsyncClient(base_url=shared_fleet.url) as http:
        answer = await http.post(
            "/v1/completions",
            json={"prompt": directed(texts=['"\u2028', "\\ \x85"]), "stream": True},
        )
    frames = sse.parse(answer.text)
    assert frames[-1].data == "[DONE]"
    assert "".join(f.json["choices"][0]["text"] for f in frames[:-1]) == '"\u2028\\ \x85'
    assert answer.headers["x-task-id"] in frames[0].json["id"]
