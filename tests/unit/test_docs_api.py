"""docs/api.md against the code: its endpoints, errors and fields are those that there are."""

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError
from tests.support.readme import ROOT, SOURCE, code_spans, table_rows

from millstream.api.app import create_app
from millstream.api.errors import status_of
from millstream.api.openai import mapping
from millstream.api.openai.completion_schemas import CompletionRequest
from millstream.api.openai.response_request import options_of
from millstream.api.openai.response_schemas import ResponseRequest
from millstream.api.openai.schemas import ChatCompletionRequest, TaskBody
from millstream.api.simple.schemas import SimpleBody, SimpleQuery
from millstream.shared import errors
from millstream.shared.settings import Settings

API = (ROOT / "docs" / "api.md").read_text("utf-8")


def test_every_endpoint_is_described() -> None:
    app, _ = create_app(Settings.model_construct())
    there = {
        f"{method.upper()} {path}"
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    described = {code_spans(row[0])[0] for row in table_rows(API, "## Endpoints")}
    there |= {"GET /", "GET /fleet"}  # pages are for people, not for clients made of the schema
    assert {re.sub(r"\{name:path\}", "{name}", route) for route in there} == described


def test_every_error_code_is_described() -> None:
    described = {(row[0], code_spans(row[1])[0]) for row in table_rows(API, "## Errors")}
    codes = set()
    for file in [*SOURCE.glob("[asw]*/**/*.py"), *SOURCE.glob("shared/lua/*.lua")]:
        codes |= set(re.findall(r'(?:code=|"code": )"(\w+)"', file.read_text("utf-8")))
    by_status = {code: status for status, code in described}
    for name, error in inspect.getmembers(errors, inspect.isclass):
        if issubclass(error, errors.MillstreamError) and error not in (
            errors.SettingsError,  # ends a process
            errors.TaskFailed,  # tells the task's own code
            errors.FleetUnavailable,  # always one of its kinds
        ):
            codes.add(error.default_code)
            assert by_status[error.default_code] == str(status_of(error("")))
            assert name
    assert {code for _, code in described} == codes | {"not_found", "method_not_allowed"}


def check_refusals(row: str, name: str, parse: Callable[[dict[str, Any]], object]) -> None:
    """A refused field takes null and what its row allows, and no other empty value for it."""
    words = code_spans(row.partition("but for ")[2])
    allowed = [None, *(word if word.isalpha() else json.loads(word) for word in words)]
    for good in allowed:
        parse({name: good})
    for empty in (0, 0.0, "", False, [], {}):
        if not any(type(good) is type(empty) and good == empty for good in allowed):
            with pytest.raises(ValidationError, match=name):
                parse({name: empty})


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"}], **fields}
    )


def test_the_fields_of_a_chat_are_those_of_its_schema() -> None:
    rows = {code_spans(name)[0]: text for name, text in table_rows(API, "### Fields of a chat")}
    assert set(rows) == set(ChatCompletionRequest.model_fields)
    refused = {
        "response_format": {"type": "json_object"},
        "tools": [{"type": "function"}],
        "functions": [{"name": "f"}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy"},
        "prediction": {"type": "content"},
        "web_search_options": {},
    }
    refused |= dict.fromkeys(("tool_choice", "function_call"), "required")
    refused |= dict.fromkeys(("reasoning_effort", "verbosity"), "low")
    assert {name for name, text in rows.items() if text.startswith("refused")} == set(refused)
    for name, bad in refused.items():
        with pytest.raises(ValidationError, match=name):
            chat(**{name: bad})
        check_refusals(rows[name], name, lambda fields: chat(**fields))

    ignored = {name for name, text in rows.items() if text == "ignored"}
    plain = mapping.sampling_of(chat(), None)
    values = {"metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True}
    for name in ignored:
        assert mapping.sampling_of(chat(**{name: values.get(name, "x")}), None) == plain
    supported = {name for name, text in rows.items() if text.startswith("supported")}
    assert supported | set(refused) | ignored == set(rows)


def test_the_fields_of_a_completion_are_those_of_its_schema() -> None:
    rows = dict(table_rows(API, "### Fields of a completion"))
    described = {code_spans(name)[0] for name in rows}
    assert described == set(CompletionRequest.model_fields)
    for name, value in {"suffix": "x", "best_of": 2}.items():
        assert rows[f"`{name}`"].startswith("refused")
        with pytest.raises(ValidationError, match=name):
            CompletionRequest.model_validate({"prompt": "x", name: value})
        check_refusals(
            rows[f"`{name}`"],
            name,
            lambda fields: CompletionRequest.model_validate({"prompt": "x", **fields}),
        )


def test_the_fields_of_a_response_are_those_of_its_schema() -> None:
    rows = {code_spans(row[0])[0]: row[1] for row in table_rows(API, "### Fields of a response")}
    assert set(rows) == set(ResponseRequest.model_fields)
    refused = {
        "text": {"format": {"type": "json_object"}},
        "truncation": "auto",
        "tools": [{}],
        "tool_choice": "required",
        "top_logprobs": 1,
        "reasoning": {"effort": "low"},
        "conversation": "conv_1",
        "prompt": {"id": "x"},
    }
    assert {name for name, text in rows.items() if text.startswith("refused")} == set(refused)
    for name, value in refused.items():
        with pytest.raises(ValidationError, match=name):
            ResponseRequest.model_validate({"input": "x", name: value})
        check_refusals(
            rows[name],
            name,
            lambda fields: ResponseRequest.model_validate({"input": "x", **fields}),
        )
    again = {name for name, text in rows.items() if text.startswith("said again")}
    assert again <= set(msgspec.structs.asdict(options_of(ResponseRequest(input="x"), 0)))


def test_the_fields_of_a_task_are_those_of_its_schema() -> None:
    described = {code_spans(row[0])[0] for row in table_rows(API, "### Fields of a task")}
    assert described == set(TaskBody.model_fields)


def test_the_fields_of_a_simple_request_are_those_of_its_schemas() -> None:
    described = {code_spans(row[0])[0] for row in table_rows(API, "### Fields of a simple request")}
    assert described == set(SimpleBody.model_fields)
    in_a_query = described - {"messages", "stream"} | {"idempotency_key"}
    assert in_a_query == set(SimpleQuery.model_fields)
