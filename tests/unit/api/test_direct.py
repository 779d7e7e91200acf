"""Routes that FastAPI lists and does not serve: the same answers, by a shorter way."""

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send
from tests.support.redis_servers import Servers

from millstream.api import direct
from millstream.api.admission import Admission
from millstream.api.app import create_app
from millstream.api.errors import install_error_handlers
from millstream.api.request_counts import RequestCounts
from millstream.api.routes.asked import AskedHere
from millstream.shared.errors import InvalidRequest
from millstream.shared.settings import Settings

DIRECT = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tasks")
ELSE = {  # what is served adds some
    "cache-control", "content-security-policy", "cross-origin-resource-policy", "referrer-policy",
    "vary", "x-content-type-options", "x-frame-options",
    "retry-after",  # who is refused draws a ticket
}  # fmt: skip


STRAIGHT = {"x-straight": "1"}
"""A header of the test's: asks FastAPI alone."""


@pytest.fixture(scope="module")
def pair(servers: Servers) -> Iterator[tuple[FastAPI, TestClient]]:
    """An application, and a client of what is served, or of it alone."""
    settings = Settings.model_validate(
        {"redis_url": servers.fresh_url(), "model": "m", "max_queue": 0}
    )
    app, served = create_app(settings)

    async def either(scope: Scope, receive: Receive, send: Send) -> None:
        straight = (b"x-straight", b"1") in scope.get("headers", ())
        await (app if straight else served)(scope, receive, send)

    with TestClient(either, raise_server_exceptions=False) as client:
        yield app, client


def both(client: TestClient, method: str, path: str, **asked: Any) -> list[httpx.Response]:
    """FastAPI's answer, and that of what is served."""
    headers = asked.pop("headers", {})
    return [
        client.request(method, path, headers=headers | more, **asked) for more in (STRAIGHT, {})
    ]


@pytest.mark.parametrize("path", DIRECT)
def test_fastapi_is_not_asked(
    pair: tuple[FastAPI, TestClient], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, client = pair

    async def broken(*_: Any) -> None:
        raise AssertionError("FastAPI was asked")

    monkeypatch.setattr(app, "middleware_stack", broken)
    assert client.post(path, json={"no such field": 1}).status_code == 400
    assert client.get("/health").status_code == 500


@pytest.mark.parametrize("path", DIRECT)
@pytest.mark.parametrize(
    ("method", "asked", "status"),
    [
        ("POST", {"json": {"no such field": 1}}, 400),
        ("POST", {"content": b"{"}, 400),
        ("POST", {"content": b"x", "headers": {"content-type": "text/plain"}}, 400),
        ("POST", {"content": b" " * 10_000_000}, 413),
        ("POST", {"json": {}, "headers": {"host": "evil.example"}}, 403),
        ("POST", {"json": {"messages": [{"role": "user", "content": "x"}]}}, None),
        ("POST", {"json": {"prompt": "x"}}, None),
        ("GET", {}, 405),
        ("OPTIONS", {}, 405),
        ("QUERY", {}, 405),
    ],
)
def test_answers_are_those_of_fastapi(
    pair: tuple[FastAPI, TestClient],
    path: str,
    method: str,
    asked: dict[str, Any],
    status: int | None,
) -> None:
    """Byte for byte, and header for header."""
    first, second = both(pair[1], method, path, **asked)
    assert (first.status_code, first.content) == (second.status_code, second.content)
    assert _headers(first) == _headers(second)
    assert first.status_code == status if status else first.status_code in (400, 503)
    assert first.json()["error"]["message"]


def _headers(answer: httpx.Response) -> list[tuple[str, str]]:
    return [pair for pair in answer.headers.multi_items() if pair[0] not in ELSE]


@pytest.mark.parametrize("path", ["/tasks/", "//tasks", "/TASKS", "/tasks%2F", "/%74asks/x"])
def test_other_paths_are_fastapis(pair: tuple[FastAPI, TestClient], path: str) -> None:
    first, second = both(pair[1], "POST", path, json={})
    assert (first.status_code, first.content) == (second.status_code, second.content)


def test_a_bug_is_answered_and_logged(
    pair: tuple[FastAPI, TestClient],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Admission, "submit", broken)
    with caplog.at_level(logging.ERROR):
        first, second = both(pair[1], "POST", "/tasks", json={"prompt": "x"})
    told = [record.getMessage() for record in caplog.records]
    assert told.count("bug in POST /tasks") == 2
    assert first.status_code == second.status_code == 500
    assert first.content == second.content
    assert _headers(first) == _headers(second)


def test_an_error_of_the_framework_has_its_answer(
    pair: tuple[FastAPI, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refusing(*_: Any, **__: Any) -> None:
        raise HTTPException(418, "on purpose")

    monkeypatch.setattr(Admission, "submit", refusing)
    first, second = both(pair[1], "POST", "/tasks", json={"prompt": "x"})
    assert (first.status_code, first.content) == (second.status_code, second.content)
    assert second.status_code == 418


async def test_after_the_beginning_there_is_no_other_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server cuts it; a second head would be another fault on top."""
    router, app, counts = APIRouter(), FastAPI(), RequestCounts()
    install_error_handlers(app, counts, [router])

    class Broken(Response):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise InvalidRequest("too late")

    @router.post("/broken")
    async def broken(asked: AskedHere) -> Response:
        return Broken()

    async def nothing(_: Request) -> None: ...

    monkeypatch.setattr(direct, "asked_of", nothing)
    scope: Scope = {"type": "http", "method": "POST", "path": "/broken", "headers": []}
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(InvalidRequest, match="too late"):
        await direct.Direct(app, [router])(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start"]
    assert not counts.refused
