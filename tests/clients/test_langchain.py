"""LangChain's `ChatOpenAI` against a fleet: chats and Responses."""

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

# Without the fixtures, the first of which installs the clients.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(30, func_only=True)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def report(run: Run) -> dict[str, Any]:
    return await run("langchain_chat.py")


@pytest.mark.parametrize("form", ["conversation", "responses_conversation", "responses_chained"])
async def test_a_conversation(report: dict[str, Any], form: str) -> None:
    check_conversation(report[form])


async def test_a_stream(report: dict[str, Any]) -> None:
    check_stream(report["stream"])
    check_stream(report["responses_stream"], finish_reason=None)  # LangChain tells none there


@pytest.mark.parametrize("way", ["cancel", "cancel_async"])
async def test_who_leaves_ends_the_task(
    shared_fleet: LocalFleet, report: dict[str, Any], way: str
) -> None:
    assert report[way]["state"] == "cancelled"  # while the program went on
    await check_cancelled(shared_fleet, report[way]["task_id"])


async def test_errors_are_its_own(report: dict[str, Any]) -> None:
    for case, kind, status, message in (
        ("no_model", "ModelNotFoundError", 404, NO_MODEL),
        ("too_hot", "ModelInvalidRequestError", 400, TOO_HOT),
        ("wrong_key", "ModelAuthenticationError", 401, WRONG_KEY),
    ):
        told = report[case]
        assert f"langchain_core.exceptions.{kind}" in told["kinds"]
        assert told["status"] == status
        assert told["message"] == f"Error code: {status} - {message}"


async def test_it_comes_back_when_it_is_told_to(report: dict[str, Any]) -> None:
    check_limited(report["limited"])
