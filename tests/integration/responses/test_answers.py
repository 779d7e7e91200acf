"""What a response is asked for and answers: whole, at the end of its budget, refused, again."""

from typing import Any

import httpx
import openai
import pytest
from tests.support.responses import chat_text, directed, ended

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
