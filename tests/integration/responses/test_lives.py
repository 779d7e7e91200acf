"""How a response lives and ends: polled, cancelled, failed, deleted, not stored, left alone."""

import asyncio

import httpx
import openai
import pytest
from openai.types.responses import Response
from tests.support import sse
from tests.support.local_fleet import LocalFleet
from tests.support.responses import chat_text, directed, ended, task_of
from tests.support.tombs import tombs_of
from tests.support.waiting import eventually

from millstream.shared.keys import Keys

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
    asked = {
        "model": "fake",
        "input": directed(tokens=4, delay_s=delay, delay_at=[3]),
        "background": True,
    }
    key = {"Idempotency-Key": f"deleted {running}"}
    created = await client.responses.create(**asked, extra_headers=key)
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
    with pytest.raises(openai.APIStatusError) as gone:
        await client.responses.create(**asked, extra_headers=key)
    assert (gone.value.status_code, gone.value.code) == (410, "response_deleted")
    assert gone.value.param == "Idempotency-Key"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="fake", input="y", previous_response_id=created.id)
    assert refused.value.code == "previous_response_not_found"
    keys = Keys(0)
    task_id = task_of(created.id)
    assert not await shared_fleet.redis.exists(keys.task(task_id), keys.log(task_id))
    assert not await tombs_of(shared_fleet.redis, task_id)
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
