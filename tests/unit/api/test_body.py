"""What a body may have, counted before any value of it is made."""

import json

import pytest
from pydantic import BaseModel

from millstream.api.body import MOST_VALUES, parse_body
from millstream.shared.errors import InvalidRequest


class Body(BaseModel):
    """One field of any kind."""

    field: object


def test_a_body_has_so_many_values_and_no_more() -> None:
    most = [1] * (MOST_VALUES - 1)  # with the list itself
    assert parse_body(json.dumps({"field": most}).encode(), Body).field == most
    with pytest.raises(InvalidRequest) as refused:
        parse_body(json.dumps({"field": [*most, 1]}).encode(), Body)
    assert refused.value.param == "field"


@pytest.mark.parametrize("text", [', [ { "', '\\", [{', "\\\\,[{", '"' * 5, "\\n,,,"])
def test_what_stands_in_a_string_is_no_value(text: str) -> None:
    long = text * MOST_VALUES
    body = json.dumps({"before": long, "field": [long], long[:99]: 1}).encode()
    assert parse_body(body, Body).field == [long]


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
        with pytest.raises(InvalidRequest, match="more than 200000 values"):
            parse_body(body.encode(), Body)
