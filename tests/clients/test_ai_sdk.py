"""The Vercel AI SDK against a fleet: Responses, chats, and its OpenAI-compatible provider."""

from typing import Any

import pytest
import pytest_asyncio
from tests.clients.conftest import Run
from tests.support.client_plan import (
    NO_MODEL,
    TOO_HOT,
    WRONG_KEY,
    check_cancelled,
    check_conversation,
    check_limited,
    check_stream,
)
from tests.support.local_fleet import LocalFleet

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(30, func_only=True),
    pytest.mark.parametrize("provider", ["responses", "chat", "compatible"]),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reports(run: Run) -> dict[str, Any]:
    return await run("ai_sdk.mjs")


@pytest.fixture
def report(reports: dict[str, Any], provider: str) -> dict[str, Any]:
    return reports[provider]


async def test_a_conversation(report: dict[str, Any]) -> None:
    check_conversation(report["conversation"])


async def test_a_stream(report: dict[str, Any]) -> None:
    check_stream(report["stream"])


async def test_who_leaves_ends_the_task(shared_fleet: LocalFleet, report: dict[str, Any]) -> None:
    assert report["cancel"]["state"] == "cancelled"  # while the program went on
    await check_cancelled(shared_fleet, report["cancel"]["task_id"])


async def test_errors_are_its_own(report: dict[str, Any]) -> None:
    for case, status, message, param in (
        ("no_model", 404, NO_MODEL, "model"),
        ("too_hot", 400, TOO_HOT, "temperature"),
        ("wrong_key", 401, WRONG_KEY, None),
    ):
        assert report[case] == {
            "name": "AI_APICallError",
            "status": status,
            "message": message,
            "param": param,
            "retryable": False,
        }


async def test_it_comes_back_when_it_is_told_to(report: dict[str, Any]) -> None:
    check_limited(report["limited"])
