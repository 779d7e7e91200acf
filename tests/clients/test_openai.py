"""The official openai client against a fleet: sync, async, its stream helpers, and Responses."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from tests.support.client_plan import (
    FIRST,
    NO_MODEL,
    SECOND,
    STREAMED,
    TOO_HOT,
    WRONG_KEY,
    Plan,
    check_cancelled,
    check_conversation,
    check_limited,
    check_stream,
)
from tests.support.local_fleet import LocalFleet

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(30, func_only=True)]


@pytest.fixture(scope="module")
def client(plan: Plan) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{plan.open_url}/v1", api_key="none") as session:
        yield session


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def async_client(plan: Plan) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{plan.open_url}/v1", api_key="none") as session:
        yield session


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def chat(text: str, **options: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [user(text)], **options}


STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def task_of(chunk: Any) -> str:
    return chunk.id.removeprefix("chatcmpl-")


def chat_report(*answers: Any) -> dict[str, Any]:
    return {
        "texts": [answer.choices[0].message.content for answer in answers],
        "prompt_tokens": [answer.usage.prompt_tokens for answer in answers],
    }


def response_report(*answers: Any) -> dict[str, Any]:
    return {
        "texts": [answer.output_text for answer in answers],
        "prompt_tokens": [answer.usage.input_tokens for answer in answers],
    }


def chunks_report(chunks: list[Any]) -> dict[str, Any]:
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    usage = chunks[-1].usage
    return {
        "pieces": [choice.delta.content for choice in choices],
        "finish_reason": choices[-1].finish_reason,
        "usage": [usage.prompt_tokens, usage.completion_tokens],
    }


@pytest.mark.parametrize("as_given", [lambda message: message, lambda message: message.to_dict(),
                                      lambda message: message.model_dump()])  # fmt: skip
async def test_a_conversation(client: openai.OpenAI, as_given: Callable[[Any], Any]) -> None:
    """The answer is given back as people do it: as it is, and as either dictionary of it."""
    asked = chat(FIRST)
    first = client.chat.completions.create(**asked)
    asked["messages"] += [as_given(first.choices[0].message), user(SECOND)]
    check_conversation(chat_report(first, client.chat.completions.create(**asked)))


async def test_an_async_conversation(async_client: openai.AsyncOpenAI) -> None:
    asked = chat(FIRST)
    first = await async_client.chat.completions.create(**asked)
    asked["messages"] += [first.choices[0].message, user(SECOND)]
    check_conversation(chat_report(first, await async_client.chat.completions.create(**asked)))


async def test_a_conversation_of_responses(client: openai.OpenAI) -> None:
    """By the response's id, by its output as it came, and by a reference to its output."""
    first = client.responses.create(model="fake", input=FIRST)
    chained = client.responses.create(model="fake", input=SECOND, previous_response_id=first.id)
    check_conversation(response_report(first, chained))
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    for output in (first.output, [item.model_dump() for item in first.output], [reference]):
        turns: Any = [user(FIRST), *output, user(SECOND)]
        whole = client.responses.create(model="fake", input=turns)
        check_conversation(response_report(first, whole))


async def test_a_stream(client: openai.OpenAI) -> None:
    check_stream(chunks_report(list(client.chat.completions.create(**chat(STREAMED, **STREAM)))))


async def test_an_async_stream(async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.chat.completions.create(**chat(STREAMED, **STREAM))
    check_stream(chunks_report([chunk async for chunk in stream]))


async def test_the_stream_helper(client: openai.OpenAI) -> None:
    options: Any = {"stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**chat(STREAMED, **options)) as stream:
        events = list(stream)
        answer = stream.get_final_completion()
    assert answer.usage is not None
    check_stream(
        {
            "pieces": [event.delta for event in events if event.type == "content.delta"],
            "finish_reason": answer.choices[0].finish_reason,
            "usage": [answer.usage.prompt_tokens, answer.usage.completion_tokens],
        }
    )


async def test_the_stream_helper_of_responses(async_client: openai.AsyncOpenAI) -> None:
    async with async_client.responses.stream(model="fake", input=STREAMED) as stream:
        events = [event async for event in stream]
        answer = await stream.get_final_response()
    assert answer.usage is not None
    check_stream(
        {
            "pieces": [e.delta for e in events if e.type == "response.output_text.delta"],
            "finish_reason": {"completed": "stop"}[answer.status or ""],
            "usage": [answer.usage.input_tokens, answer.usage.output_tokens],
        }
    )


async def test_who_closes_a_stream_ends_the_task(
    shared_fleet: LocalFleet, plan: Plan, client: openai.OpenAI
) -> None:
    stream = client.chat.completions.create(**chat(plan.endless, stream=True))
    task_ids = {task_of(chunk) for _, chunk in zip(range(4), stream, strict=False)}
    stream.close()
    with client.chat.completions.stream(**chat(plan.endless)) as helped:
        task_ids |= {
            task_of(event.chunk)
            for _, event in zip(range(8), helped, strict=False)
            if event.type == "chunk"
        }
    with client.responses.create(model="fake", input=plan.endless, stream=True) as events:
        for number, event in enumerate(events):
            if event.type == "response.created":
                task_ids.add(event.response.id.removeprefix("resp_"))
            if number == 8:
                break
    assert len(task_ids) == 3
    for task_id in task_ids:
        await check_cancelled(shared_fleet, task_id)


async def test_who_is_cancelled_ends_the_task(
    shared_fleet: LocalFleet, plan: Plan, async_client: openai.AsyncOpenAI
) -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def read() -> None:
        async for chunk in await async_client.chat.completions.create(
            **chat(plan.endless, stream=True)
        ):
            seen.put_nowait(task_of(chunk))

    reading = asyncio.create_task(read())
    for _ in range(4):
        task_id = await seen.get()
    reading.cancel()
    await asyncio.wait({reading})
    await check_cancelled(shared_fleet, task_id)


async def test_a_background_response_is_cancelled_by_its_id(
    shared_fleet: LocalFleet, plan: Plan, client: openai.OpenAI
) -> None:
    stream = client.responses.create(model="fake", input=plan.endless, background=True, stream=True)
    response_id = ""
    for number, event in enumerate(stream):
        if event.type == "response.created":
            response_id = event.response.id
        if number == 8:
            break
    stream.close()
    assert client.responses.retrieve(response_id).status == "in_progress"  # nobody needs to read
    assert client.responses.cancel(response_id).status == "cancelled"
    await check_cancelled(shared_fleet, response_id.removeprefix("resp_"))


async def test_errors_are_its_own(
    plan: Plan, client: openai.OpenAI, async_client: openai.AsyncOpenAI
) -> None:
    absent = {**chat("x"), "model": "gpt-9"}
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**absent)
    with pytest.raises(openai.NotFoundError) as missing_too:
        await async_client.chat.completions.create(**absent, stream=True)
    for error in (missing.value, missing_too.value):
        assert (error.code, error.param, error.type) == (
            "model_not_found",
            "model",
            "invalid_request_error",
        )
        assert error.body["message"] == NO_MODEL  # type: ignore[index]
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**chat("x", temperature=7))
    assert (wrong.value.code, wrong.value.param) == ("invalid_value", "temperature")
    assert wrong.value.body["message"] == TOO_HOT  # type: ignore[index]
    keyed = client.with_options(base_url=f"{plan.keyed_url}/v1")
    with pytest.raises(openai.AuthenticationError) as stranger:
        keyed.responses.create(model="fake", input="x")
    assert stranger.value.code == "invalid_api_key"
    assert stranger.value.body["message"] == WRONG_KEY  # type: ignore[index]


async def test_it_comes_back_when_it_is_told_to(plan: Plan) -> None:
    refusals: list[str | None] = []
    keyed: dict[str, Any] = {"base_url": f"{plan.keyed_url}/v1", "api_key": plan.key}
    with openai.OpenAI(**keyed) as one:
        first = one.chat.completions.create(**chat(plan.endless, stream=True))
        next(iter(first))

        def look(response: Any) -> None:
            if response.status_code == 429:
                refusals.append(response.headers.get("retry-after"))
                first.close()

        http = openai.DefaultHttpxClient(event_hooks={"response": [look]})
        with openai.OpenAI(**keyed, http_client=http, max_retries=5) as other:
            chunks = list(other.chat.completions.create(**chat(STREAMED, stream=True)))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    check_limited({"refusals": refusals, "text": text})


async def test_an_async_one_does_too(plan: Plan) -> None:
    refusals: list[str | None] = []
    keyed: dict[str, Any] = {"base_url": f"{plan.keyed_url}/v1", "api_key": plan.key}
    async with openai.AsyncOpenAI(**keyed) as one:
        first = await one.chat.completions.create(**chat(plan.endless, stream=True))
        await anext(aiter(first))

        async def look(response: Any) -> None:
            if response.status_code == 429:
                refusals.append(response.headers.get("retry-after"))
                await first.close()

        http = openai.DefaultAsyncHttpxClient(event_hooks={"response": [look]})
        async with openai.AsyncOpenAI(**keyed, http_client=http, max_retries=5) as other:
            stream = await other.chat.completions.create(**chat(STREAMED, stream=True))
            chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    check_limited({"refusals": refusals, "text": text})
