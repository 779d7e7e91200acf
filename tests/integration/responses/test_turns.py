"""Responses that go on from others, items named by their ids, and the list of what was asked."""

from typing import Any

import httpx
import openai
import pytest
from tests.support.responses import chat_text, directed, ended, task_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
