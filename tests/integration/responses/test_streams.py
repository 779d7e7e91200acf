"""The events of a response: their order and numbers, and a stream that goes on after any number."""

import asyncio
from typing import Any

import httpx
import openai
import pytest
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.responses import chat_text, directed, ended, task_of

from millstream.shared.keys import Keys

pytestmark = pytest.mark.asyncio(loop_scope="module")

BEGUN = ["response.output_item.added", "response.content_part.added"]
DONE = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
DELTA = "response.output_text.delta"


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


async def test_the_official_client_waits_through_silence(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(
        model="fake", input=directed(tokens=2, delay_s=1.2), stream=True, background=True
    )
    events = [event async for event in stream]
    assert events[-1].type == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("status", ["completed", "incomplete", "cancelled", "failed"])
async def test_nothing_after_the_last_number_and_the_connection_lives_on(
    client: openai.AsyncOpenAI, shared_fleet: LocalFleet, status: str
) -> None:
    directive: dict[str, Any] = {"tokens": 4}
    if status == "cancelled":
        directive |= {"delay_s": 60, "delay_at": [3]}
    elif status == "failed":
        directive |= {"error_at": 3}
    response = await client.responses.create(
        model="fake",
        input=directed(**directive),
        background=True,
        max_output_tokens=2 if status == "incomplete" else None,
    )
    if status == "cancelled":
        await client.responses.cancel(response.id)
    assert (await ended(client, response.id)).status == status
    query = {"stream": "true"}
    async with httpx.AsyncClient(
        base_url=shared_fleet.url, limits=httpx.Limits(max_connections=1)
    ) as http:
        url = f"/v1/responses/{response.id}"
        last = sse.parse((await http.get(url, params=query)).text)[-1].json["sequence_number"]
        for _ in range(3):
            rest = await http.get(url, params={**query, "starting_after": str(last)})
            assert (rest.status_code, rest.text) == (200, ": ok\n\n")
            assert (await http.get("/health")).status_code == 200
