"""What a body may have, counted before any value of it is made."""

import json

import pytest
from pydantic import BaseModel

from millstream.api.body import most_values, parse_body
from millstream.shared.errors import InvalidRequest

MAX_PROMPT_CHARS = 262_144
MOST_VALUES = most_values(MAX_PROMPT_CHARS)


class Body(BaseModel):
    """One field of any kind."""

    field: object


def parsed(body: str, max_prompt_chars: int = MAX_PROMPT_CHARS) -> Body:
    """As the API does it."""
    return parse_body(body.encode(), Body, max_prompt_chars=max_prompt_chars)


def test_a_body_has_so_many_values_and_no_more() -> None:
    most = [1] * (MOST_VALUES - 2)  # with the list and the body
    assert parsed(json.dumps({"field": most})).field == most
    with pytest.raises(InvalidRequest) as refused:
        parsed(json.dumps({"field": [*most, 1]}))
    assert refused.value.param == "field"
    with pytest.raises(InvalidRequest) as refused:
        parsed(json.dumps({f"f{number}": 1 for number in range(MOST_VALUES)}))
    assert refused.value.param is None  # none of them by itself


@pytest.mark.parametrize("empty", ["[]", "{}", "[ ]", "{\n}", '""', '[""]', '{"":""}'])
def test_what_is_empty_is_one_value(empty: str) -> None:
    values = 1 if empty[1:-1].strip() == "" else 2
    most = (MOST_VALUES - 2) // values
    for count, fits in ((most, True), (most + 1, False)):
        body = '{"field":[' + ",".join([empty] * count) + "]}"
        if fits:
            assert parsed(body).field == [json.loads(empty)] * count
        else:
            with pytest.raises(InvalidRequest):
                parsed(body)


def test_token_ids_are_as_many_as_a_prompt_may_have() -> None:
    most = [123_456] * 1_000_000
    body = json.dumps({"field": most})
    assert parsed(body, 4 * len(most)).field == most


@pytest.mark.parametrize("text", [', [ { "', '\\", [{', "\\\\,[{", '"' * 5, "\\n,,,"])
def test_what_stands_in_a_string_is_no_value(text: str) -> None:
    long = text * MOST_VALUES
    body = json.dumps({"before": long, "field": [long], long[:99]: 1})
    assert parsed(body).field == [long]


@pytest.mark.parametrize(
    "many",
    [
        "[]," * MOST_VALUES,
        '"",' * MOST_VALUES,
        '"\\",[",' * MOST_VALUES,
        '"\\\\",' * MOST_VALUES,
        '{"a":"b"},' * MOST_VALUES,
        "[" * MOST_VALUES,
    ],
)
def test_a_multitude_is_refused_even_if_it_does_not_end(many: str) -> None:
    for whole in (True, False):
        body = f'{{"field":[{many}' + "0]}" * whole
        with pytest.raises(InvalidRequest, match="more than 131072 values"):
            parsed(body)
