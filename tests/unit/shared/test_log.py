"""No secret in a line, whoever wrote it."""

import json
import logging

import pytest

from millstream.api.auth.key_file import new_key
from millstream.shared.log import Flood, JsonFormatter, TextFormatter, hide_secrets

JWT = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiJhbm4ifQ.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Authorization: Bearer sk-secret1", "Authorization: Bearer ***"),
        ("{'authorization': 'bearer sk-secret1', 'x'}", "{'authorization': 'bearer ***', 'x'}"),
        ('"GET /t/stream?ticket=secret1&x=1 HTTP"', '"GET /t/stream?ticket=***&x=1 HTTP"'),
        ("/v1/models?a=1&api_key=secret1", "/v1/models?a=1&api_key=***"),
        ("redis://:secret1@host:6379/0", "redis://:***@host:6379/0"),
        ("rediss://user:secret1@host/0 failed", "rediss://user:***@host/0 failed"),
        ("h:1/m?sentinel_password=secret1", "h:1/m?sentinel_password=***"),
        (f"given {JWT}.", "given eyJ***."),
        ("http://host:80/path and a@b", "http://host:80/path and a@b"),
        ("nothing here: keys=3, bearer", "nothing here: keys=3, bearer"),
    ],
)  # fmt: skip
def test_a_line_is_cleaned(line: str, shown: str) -> None:
    assert hide_secrets(line) == shown


def test_a_key_and_a_traceback() -> None:
    key = new_key()
    assert hide_secrets(f"x {key} y") == "x ms-*** y"
    try:
        raise ValueError(f"bad header: Bearer {key}")
    except ValueError as error:
        caught = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("x", 40, "f", 1, "url %s", (f"?key={key}",), caught)
    for formatter in (TextFormatter(), JsonFormatter()):
        text = formatter.format(record)
        assert key not in text
        assert "ValueError: bad header: Bearer ***" in text
    assert json.loads(JsonFormatter().format(record))["message"] == "url ?key=***"


def line_at(created: float, text: str = "bug in %s") -> logging.LogRecord:
    record = logging.LogRecord("x", 40, "f", 1, text, (created,), None)
    record.created = created
    return record


def test_a_flood_is_held_back_and_counted() -> None:
    flood = Flood()
    passed = [flood.filter(line_at(100 + n / 1000)) for n in range(500)]
    assert passed == [True] * 10 + [False] * 490
    assert flood.filter(line_at(100.5, "another fault"))
    after = line_at(101.0)
    assert flood.filter(after)
    assert json.loads(JsonFormatter().format(after))["suppressed"] == 490
    assert TextFormatter().format(after).endswith("(490 more like this were not written)")
    again = line_at(102.0)
    assert flood.filter(again)
    assert "suppressed" not in json.loads(JsonFormatter().format(again))


def test_kinds_without_end_are_forgotten() -> None:
    flood = Flood()
    assert all(flood.filter(line_at(100, f"filled in {n}")) for n in range(1000))
    assert len(flood._kinds) <= Flood.MOST_KINDS
