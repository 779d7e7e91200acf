"""The application within one process: two of them, its CORS, and its own failures."""

import pytest
from starlette.testclient import TestClient

from millstream.api.app import create_app
from millstream.shared.settings import Settings

GOOD, EVIL = "https://good.example", "https://evil.example"


def settings(redis_url: str, **changes: object) -> Settings:
    return Settings.model_validate({"redis_url": redis_url, "model": "fake", **changes})


def test_two_applications_in_one_process(redis_url: str) -> None:
    """Each has an event loop of its own, and no state of the first is left (sse-starlette#59)."""
    for _ in range(2):
        _, served = create_app(settings(redis_url))
        with TestClient(served) as client:
            answer = client.post("/tasks", json={"prompt": "x"})
            while answer.status_code == 503:  # it may not have reached Redis yet
                answer = client.post("/tasks", json={"prompt": "x"})
            task_id = answer.json()["task_id"]
            assert client.post(f"/tasks/{task_id}/stop").json()["status"] == "cancelled"
            text = client.get(f"/tasks/{task_id}/stream").text
            assert text.startswith(": ok\n\nid: 1\nevent: cancelled\n")


@pytest.mark.parametrize(("origin", "allowed"), [(GOOD, GOOD), (EVIL, None)])
def test_cors_answers_those_it_was_told_of(
    redis_url: str, origin: str, allowed: str | None
) -> None:
    """Also on a refusal and on a failure of ours, and never with credentials (starlette#3246)."""
    app, served = create_app(settings(redis_url, cors_origins=GOOD, max_queue=0))

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("on purpose")

    with TestClient(served, raise_server_exceptions=False) as client:
        asked = {"Origin": origin}
        preflight = {**asked, "Access-Control-Request-Method": "POST"}
        answers = [
            client.options("/tasks", headers=preflight),
            client.post("/tasks", json={"prompt": "x"}, headers=asked),
            client.get("/broken", headers=asked),
            client.get("/health", headers=asked),
        ]
    statuses = [answer.status_code for answer in answers]
    assert statuses == ([200, 503, 500, 200] if allowed else [400, 403, 500, 200])
    assert answers[2].json()["error"]["code"] == "internal_error"
    for answer in answers:
        assert answer.headers.get("access-control-allow-origin") == allowed
        assert "access-control-allow-credentials" not in answer.headers


def test_no_request_waits_for_a_thread(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI sends a dependency that is no asynchronous function to one, a class too."""

    async def refuse(call: object, **_: object) -> None:
        raise AssertionError(f"{call} goes to a thread")

    monkeypatch.setattr("fastapi.dependencies.utils.run_in_threadpool", refuse)
    _, served = create_app(settings(redis_url))
    with TestClient(served) as client:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tasks", "/chat"):
            assert client.post(path, json={"no such field": 1}).status_code == 400
