"""The Responses API through a real pod, Valkey and worker, as the official client sees it."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.waiting import eventually

from millstream.shared.keys import Keys

pytestmark = pytest.mark.asyncio(loop_scope="module")

BEGUN = ["response.output_item.added", "response.content_part.added"]
DONE = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
DELTA = "response.output_text.delta"


@pytest_asyncio.fixture(loop_scope="module")
async def client(shared_fleet: LocalFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{shared_fleet.url}/v1", api_key="none", max_retries=0
    ) as session:
        yield session


@pytest_asyncio.fixture(loop_scope="module")
async def http(shared_fleet: LocalFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=shared_fleet.url, timeout=20) as session:
        yield session


def directed(prompt: str = "hello", **directive: object) -> str:
    return f"@fake {json.dumps(directive)}\n{prompt}"


def task_of(response_id: str) -> str:
    return response_id.removeprefix("resp_")


async def chat_text(client: openai.AsyncOpenAI, *turns: tuple[str, str]) -> str | None:
    """What the fake engine says to a conversation, whichever way it is asked."""
    messages: Any = [{"role": role, "content": content} for role, content in turns]
    answer = await client.chat.completions.create(model="fake", messages=messages)
    return answer.choices[0].message.content


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Response:
    async def look() -> Response | None:
        response = await client.responses.retrieve(response_id)
        return None if response.status in ("queued", "in_progress") else response

    return await eventually(look, what="the end of the response")


async def test_a_whole_answer(client: openai.AsyncOpenAI) -> None:
    asked = directed(tokens=20)
    response = await client.responses.create(
        model="fake",
        input=asked,
        instructions="Be brief.",
        max_output_tokens=30,
        metadata={"topic": "mills"},
        temperature=0.5,
        user="ann",
    )
    assert response.output_text == await chat_text(client, ("system", "Be brief."), ("user", asked))
    assert len(response.output_text.split()) == 20
    assert response.status == "completed"
    assert response.usage is not None
    assert (response.usage.output_tokens, response.usage.total_tokens) == (
        20,
        20 + response.usage.input_tokens,
    )
    assert (response.instructions, response.metadata, response.user) == (
        "Be brief.",
        {"topic": "mills"},
        "ann",
    )
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 1.0, 30)
    assert (response.background, response.error, response.incomplete_details) == (False, None, None)
    assert await client.responses.retrieve(response.id) == response


@pytest.mark.parametrize(
    "given",
    [
        "hello mill",
        [{"role": "user", "content": "hello mill"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        [
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": "hi"},
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": "yes?", "annotations": [], "logprobs": []}
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "and "},
                    {"type": "input_text", "text": "now"},
                ],
            },
        ],
    ],
)
async def test_forms_of_input(client: openai.AsyncOpenAI, given: Any) -> None:
    expected = {
        1: [("user", "hello mill")],
        4: [("system", "be kind"), ("user", "hi"), ("assistant", "yes?"), ("user", "and now")],
    }[4 if len(given) == 4 else 1]
    if isinstance(given, list) and given[0].get("type"):
        expected = [("user", "hello")]
    response = await client.responses.create(model="fake", input=given)
    assert response.output_text == await chat_text(client, *expected)


@pytest.mark.parametrize("background", [False, True])
async def test_the_events_of_a_stream(client: openai.AsyncOpenAI, background: bool) -> None:
    asked = directed(texts=["Grind", "", " the\u2028", " corn."])
    stream = await client.responses.create(
        model="fake", input=asked, stream=True, background=background
    )
    events = [event async for event in stream]
    opening = ["response.created", "response.in_progress", *BEGUN]
    if background:
        opening.insert(1, "response.queued")
    assert [event.type for event in events] == [
        *opening, DELTA, DELTA, DELTA, DELTA, *DONE, "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    text = "".join(event.delta for event in events if event.type == DELTA)
    assert text == last.response.output_text == "Grind the\u2028 corn."
    assert last.response == await client.responses.retrieve(last.response.id)


async def test_what_a_caller_s_limits_change_is_told_alike(shared_fleet: LocalFleet) -> None:
    bounded = await shared_fleet.api(rate_limit_tokens_per_stream=5)
    async with httpx.AsyncClient(base_url=bounded.url) as http:
        body = {"input": directed(tokens=9), "stream": True}
        created = await http.post("/v1/responses", json=body)
        url = "/v1/responses/resp_" + created.headers["x-task-id"]
        again = await http.get(url, params={"stream": "true"})
        refused = await http.post("/v1/responses", json={**body, "max_output_tokens": 6})
    assert created.text == again.text
    last = sse.parse(created.text)[-1].json["response"]
    assert (last["status"], last["max_output_tokens"]) == ("incomplete", 5)
    assert refused.json()["error"]["param"] == "max_output_tokens"


async def test_the_streaming_helper(client: openai.AsyncOpenAI, shared_fleet: LocalFleet) -> None:
    asked = directed(tokens=12)
    async with client.responses.stream(model="fake", input=asked, background=True) as stream:
        final = await stream.get_final_response()
    assert final.output_text == await chat_text(client, ("user", asked))
    async with client.responses.stream(response_id=final.id, starting_after=9) as stream:
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(10, 21))
    assert (await stream.get_final_response()).output_text == final.output_text

    def blocking() -> list[int]:
        url = f"{shared_fleet.url}/v1"
        with (
            openai.OpenAI(base_url=url, api_key="none", max_retries=0) as other,
            other.responses.stream(response_id=final.id, starting_after=9) as rest,
        ):
            return [event.sequence_number for event in rest]

    assert await asyncio.to_thread(blocking) == list(range(10, 21))


@pytest.mark.parametrize("background", [False, True])
async def test_a_stream_goes_on_after_any_number_with_the_same_bytes(
    http: httpx.AsyncClient, background: bool
) -> None:
    """During and after: the second half of the first readers comes while the task runs."""
    body = {
        "input": directed(tokens=8, delay_s=0.3, delay_at=[5]),
        "background": background,
        "stream": True,
    }
    readers: list[asyncio.Task[httpx.Response]] = []
    async with http.stream("POST", "/v1/responses", json=body) as answer:
        url = "/v1/responses/resp_" + answer.headers["x-task-id"]
        raw = ""
        async for piece in answer.aiter_text():
            raw += piece
            if len(readers) < 5 and raw.count("\n\n") > 5:
                query = {"stream": "true", "starting_after": str(len(readers))}
                readers.append(asyncio.create_task(http.get(url, params=query)))
    blocks = raw.removeprefix(": ok\n\n").split("\n\n")
    assert len(blocks) == 4 + background + 8 + 4 + 1
    early = [(await reader).text for reader in readers]
    late = [
        (await http.get(url, params={"stream": "true", "starting_after": after})).text
        for after in range(len(blocks) - 1)
    ]
    for rest in (early, late):
        assert rest
        for after, text in enumerate(rest):
            assert text.replace(": ping\n", "") == ": ok\n\n" + "\n\n".join(blocks[after + 1 :])
    whole = await http.get(url, params={"stream": "true"})
    assert whole.text.replace(": ping\n", "") == raw.replace(": ping\n", "")
    assert "id:" not in raw


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"stream": "true", "starting_after": "12"}, "starting_after"),
        ({"stream": "true", "starting_after": "-1"}, "starting_after"),
        *(
            ({"stream": "true", "starting_after": given}, "starting_after")
            for given in ("x", "", "1_0", "+1", " 1", "1\n", "-0", "1.0", "٣", "1" * 16)
        ),
        ({"starting_after": "1"}, "starting_after"),
        ({"stream": "maybe"}, "stream"),
    ],
)
async def test_a_number_that_cannot_be(
    http: httpx.AsyncClient, query: dict[str, str], param: str
) -> None:
    whole = (await http.post("/v1/responses", json={"input": directed(tokens=4)})).json()
    answer = await http.get(f"/v1/responses/{whole['id']}", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_number_under_which_redis_has_other_bytes_by_now(
    http: httpx.AsyncClient, shared_fleet: LocalFleet
) -> None:
    whole = (await http.post("/v1/responses", json={"input": directed(tokens=4)})).json()
    task_key = Keys(0).task(task_of(whole["id"]))
    await shared_fleet.redis.hset(task_key, "rewound_at", "3")  # as a pod marks it
    for after, status in ((-1, 200), (5, 200), (6, 410), (9, 410)):
        query = {"stream": "true"} | ({"starting_after": str(after)} if after >= 0 else {})
        answer = await http.get(f"/v1/responses/{whole['id']}", params=query)
        assert answer.status_code == status, after
        if status == 410:
            assert answer.json()["error"]["code"] == "log_rewound"


async def test_an_end_by_max_output_tokens_is_incomplete(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(
        model="fake", input="x", max_output_tokens=3, stream=True
    )
    events: list[Any] = [event async for event in stream]
    assert events[-1].type == "response.incomplete"
    response = events[-1].response
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 3


async def test_a_background_response_is_polled(client: openai.AsyncOpenAI) -> None:
    asked = directed(tokens=10, delay_s=0.5, delay_at=[4])
    created = await client.responses.create(model="fake", input=asked, background=True)
    assert created.status in ("queued", "in_progress")
    assert created.background is True

    async def half() -> Response | None:
        response = await client.responses.retrieve(created.id)
        return response if len(response.output_text.split()) == 3 else None

    seen = await eventually(half, what="the first words")
    assert seen.status == "in_progress"
    assert seen.output[0].to_dict()["status"] == "in_progress"
    response = await ended(client, created.id)
    assert response.status == "completed"
    assert response.output_text == await chat_text(client, ("user", asked))
    assert response.created_at == created.created_at


async def test_cancel(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    created = await client.responses.create(
        model="fake", input=directed(tokens=9, delay_s=60, delay_at=[4]), background=True
    )
    reading = asyncio.create_task(
        http.get(f"/v1/responses/{created.id}", params={"stream": "true"})
    )

    async def begun() -> bool:
        return len((await client.responses.retrieve(created.id)).output_text.split()) == 3

    await eventually(begun, what="three words")
    cancelled = await client.responses.cancel(created.id)
    assert cancelled.status == "cancelled"
    assert len(cancelled.output_text.split()) == 3
    assert cancelled.usage is not None
    assert cancelled.usage.output_tokens == 3
    assert await client.responses.cancel(created.id) == cancelled
    assert await client.responses.retrieve(created.id) == cancelled
    # No event of OpenAI's says `cancelled`; this one is an end, and no success.
    last = sse.parse((await reading).text)[-1]
    assert last.event == "response.failed"
    assert last.json["response"] == (await http.get(f"/v1/responses/{created.id}")).json()
    done = await client.responses.create(model="fake", input="x", background=True)
    assert (await ended(client, done.id)).status == "completed"
    assert (await client.responses.cancel(done.id)).status == "completed"
    foreground = await client.responses.create(model="fake", input="x")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.cancel(foreground.id)
    assert refused.value.param == "response_id"


@pytest.mark.parametrize("running", [True, False])
async def test_delete(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, shared_fleet: LocalFleet, running: bool
) -> None:
    delay = 60 if running else 0
    created = await client.responses.create(
        model="fake", input=directed(tokens=4, delay_s=delay, delay_at=[3]), background=True
    )
    if not running:
        await ended(client, created.id)
    answer = await http.delete(f"/v1/responses/{created.id}")
    assert answer.json() == {"id": created.id, "object": "response", "deleted": True}
    url = f"/v1/responses/{created.id}"
    for again in (
        await http.get(url),
        await http.get(url, params={"stream": "true"}),
        await http.get(f"{url}/input_items"),
        await http.post(f"{url}/cancel"),
        await http.delete(url),
    ):
        assert again.status_code == 404
        assert again.json()["error"]["code"] == "response_not_found"
    assert (await http.get(f"/tasks/{task_of(created.id)}")).status_code == 404
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="fake", input="y", previous_response_id=created.id)
    assert refused.value.code == "previous_response_not_found"
    keys = Keys(0)
    task_id = task_of(created.id)
    for key in (keys.task(task_id), keys.log(task_id), keys.tomb(task_id)):
        assert not await shared_fleet.redis.exists(key)
    await shared_fleet.quiet()


@pytest.mark.parametrize(
    "given", ["resp_t0-" + "a" * 26, "resp_x", "t0-" + "a" * 26, "resp_t99-" + "a" * 26]
)
async def test_what_there_never_was(http: httpx.AsyncClient, given: str) -> None:
    for answer in (
        await http.get(f"/v1/responses/{given}"),
        await http.delete(f"/v1/responses/{given}"),
        await http.post(f"/v1/responses/{given}/cancel"),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "response_id"


async def test_a_task_that_was_asked_for_otherwise_is_no_response(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    answer = await client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "x"}]
    )
    task_id = answer.id.removeprefix("chatcmpl-")
    assert (await http.delete(f"/v1/responses/resp_{task_id}")).status_code == 404
    assert (await http.get(f"/tasks/{task_id}")).status_code == 200


async def test_what_is_not_stored_cannot_be_had_again(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(model="fake", input="x", store=False)
    assert response.status == "completed"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="fake", input="y", previous_response_id=response.id)
    assert refused.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="fake", input="x", store=False, background=True)
    assert refused.value.param == "background"


async def test_turns_follow_each_other(client: openai.AsyncOpenAI) -> None:
    turns: list[tuple[str, str]] = []
    previous = None
    for number in range(4):
        asked = directed(f"turn {number}", tokens=5 + number)
        response = await client.responses.create(
            model="fake",
            input=asked,
            instructions=f"Rule {number}." if number % 2 else None,
            previous_response_id=previous,
            max_output_tokens=6,  # the later ones are incomplete, and can be gone on from too
        )
        turns.append(("user", asked))
        system = [("system", f"Rule {number}.")] if number % 2 else []
        expected = await chat_text(client, *system, *turns)
        assert expected is not None
        assert response.output_text == " ".join(expected.split()[:6])
        assert response.previous_response_id == previous
        turns.append(("assistant", response.output_text))
        previous = response.id
    assert previous is not None
    items = [item async for item in client.responses.input_items.list(previous, order="asc")]
    told = [(item.role, item.content[0].text) for item in items]  # type: ignore[union-attr]
    assert told == turns[:-1]


async def test_turns_need_an_answer_before_them(client: openai.AsyncOpenAI) -> None:
    waiting = await client.responses.create(
        model="fake", input=directed(delay_s=60), background=True
    )
    for _ in range(2):  # while it runs, and when it is cancelled
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="fake", input="y", previous_response_id=waiting.id)
        assert refused.value.param == "previous_response_id"
        await client.responses.cancel(waiting.id)


async def test_items_are_referred_to(client: openai.AsyncOpenAI) -> None:
    """As the Vercel AI SDK does: an earlier answer, or what was asked, by its id alone."""
    first = await client.responses.create(model="fake", input=directed("one", tokens=5))
    (output,) = first.output
    page = await client.responses.input_items.list(first.id)
    asked = page.data[0]
    turns: Any = [
        {"type": "item_reference", "id": asked.id},
        {"type": "item_reference", "id": output.id},
        {"role": "user", "content": "And?"},
    ]
    second = await client.responses.create(model="fake", input=turns)
    expected = [
        ("user", directed("one", tokens=5)),
        ("assistant", first.output_text),
        ("user", "And?"),
    ]
    assert second.output_text == await chat_text(client, *expected)
    listed = [item async for item in client.responses.input_items.list(second.id, order="asc")]
    told = [(item.role, item.content[0].text) for item in listed]  # type: ignore[union-attr]
    assert told == expected  # kept in full, so the first may go

    unkept = await client.responses.create(model="fake", input=directed(tokens=1), store=False)
    waiting = await client.responses.create(
        model="fake", input=directed(delay_s=60), background=True
    )
    await client.responses.delete(first.id)
    for item_id in (
        output.id,
        unkept.output[0].id,
        f"msg_{task_of(waiting.id)}",
        f"msg_{task_of(waiting.id)}_1",
        f"msg_{task_of(waiting.id)}_x",
        waiting.id,
    ):
        reference: Any = [{"type": "item_reference", "id": item_id}]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="fake", input=reference)
        assert refused.value.param == "input[0].id"
    long = await client.responses.create(
        model="fake", input=directed(texts=["x" * 1_000], tokens=150), background=True
    )
    await ended(client, long.id)
    twice: Any = [{"type": "item_reference", "id": f"msg_{task_of(long.id)}"}] * 2
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.responses.create(model="fake", input=twice)
    assert (too_long.value.param, too_long.value.code) == ("input", "prompt_too_long")
    await client.responses.cancel(waiting.id)


async def test_pages_of_input_items(http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    given: Any = [{"role": role, "content": f"{n}"} for n, role in enumerate(roles)]
    response = await client.responses.create(model="fake", input=given, instructions="Not one.")
    url = f"/v1/responses/{response.id}/input_items"
    items = (await http.get(url, params={"order": "asc"})).json()
    assert [item["role"] for item in items["data"]] == roles
    assert [item["content"][0]["text"] for item in items["data"]] == list("012345")
    assert [item["content"][0]["type"] for item in items["data"]] == [
        "output_text" if role == "assistant" else "input_text" for role in roles
    ]
    ids = [item["id"] for item in items["data"]]
    assert (items["first_id"], items["last_id"], items["has_more"]) == (ids[0], ids[-1], False)
    page = (await http.get(url, params={"limit": 2, "after": ids[3]})).json()
    assert [item["id"] for item in page["data"]] == [ids[2], ids[1]]
    assert page["has_more"] is True
    listed = [item.id async for item in client.responses.input_items.list(response.id, limit=2)]
    assert listed == ids[::-1]
    for query, param in (
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "msg_x"}, "after"),
    ):
        refused = await http.get(url, params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"stream_options": {}}, "stream_options"),
        ({"context_management": []}, "context_management"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**9}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": f"msg_{n}"} for n in range(257)]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": "x" * 300_000}, "input"),
    ],
)
async def test_what_is_refused_is_named(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await http.post("/v1/responses", json={"input": "x", **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param, answer.text


async def test_what_changes_nothing_is_taken(client: openai.AsyncOpenAI) -> None:
    response = await client.responses.create(
        model="fake",
        input="x",
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=False,
        service_tier="auto",
        truncation="disabled",
        include=["reasoning.encrypted_content"],
        text={"format": {"type": "text"}},
        reasoning={},
        prompt_cache_key="k",
        safety_identifier="s",
        max_tool_calls=3,
        top_logprobs=0,
    )
    assert response.status == "completed"
    assert response.parallel_tool_calls is False
    assert (response.prompt_cache_key, response.safety_identifier) == ("k", "s")


async def test_a_failure_is_told_as_one(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    fails = directed(tokens=9, error_at=1)
    for stream in (False, True):
        answer = await http.post("/v1/responses", json={"input": fails, "stream": stream})
        if not stream:
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "max_attempts"
    late = await client.responses.create(
        model="fake", input=directed(tokens=9, error_at=4), background=True
    )
    response = await ended(client, late.id)
    assert (response.status, len(response.output_text.split())) == ("failed", 3)
    assert response.error is not None
    assert response.error.code == "server_error"
    last = sse.parse((await http.get(f"/v1/responses/{late.id}", params={"stream": "true"})).text)[
        -1
    ]
    assert (last.event, last.json["response"]["status"]) == ("response.failed", "failed")
    assert last.json["sequence_number"] == 8


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("background", [False, True])
async def test_who_goes_away_stops_what_is_not_in_the_background(
    shared_fleet: LocalFleet, http: httpx.AsyncClient, stream: bool, background: bool
) -> None:
    body = {
        "input": directed(tokens=5, delay_s=1, delay_at=[5]),
        "stream": stream,
        "background": background,
    }
    before = {key async for key in shared_fleet.redis.scan_iter("*:task:*")}
    request = asyncio.create_task(http.post("/v1/responses", json=body))

    async def new() -> set[bytes]:
        return {key async for key in shared_fleet.redis.scan_iter("*:task:*")} - before

    (key,) = await eventually(new, what="the task")
    task_id = key.decode().rpartition(":")[2]
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)

    async def end() -> str | None:
        status = (await http.get(f"/v1/responses/resp_{task_id}")).json()["status"]
        return None if status in ("queued", "in_progress") else status

    assert await eventually(end, what="the end") == ("completed" if background else "cancelled")


@pytest.mark.parametrize("background", [False, True])
async def test_the_same_request_again_is_the_same_response(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, background: bool
) -> None:
    body = {"input": directed(tokens=4), "background": background, "metadata": {"a": "b"}}
    headers = {"Idempotency-Key": f"twice {background}"}
    first = (await http.post("/v1/responses", json=body, headers=headers)).json()
    whole = await ended(client, first["id"])
    again = (await http.post("/v1/responses", json=body, headers=headers)).json()
    assert again == whole.to_dict() | {"error": None} | again
    assert (again["id"], again["status"]) == (first["id"], "completed")
    assert again["created_at"] == first["created_at"]
    refused = await http.post("/v1/responses", json={**body, "input": "other"}, headers=headers)
    assert refused.status_code == 409


async def test_the_official_client_waits_through_silence(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(
        model="fake", input=directed(tokens=2, delay_s=1.2), stream=True, background=True
    )
    events = [event async for event in stream]
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
