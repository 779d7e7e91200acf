"""LiteLLM's SDK against a fleet, as one of its OpenAI-compatible servers."""

from typing import Any

import pytest
import pytest_asyncio
from tests.clients.conftest import Run
from tests.support.client_plan import (
    FIRST_ANSWER,
    NO_MODEL,
    TOO_HOT,
    WRONG_KEY,
    check_cancelled,
    check_conversation,
    check_limited,
    check_stream,
)
from tests.support.local_fleet import LocalFleet

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(30, func_only=True)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def report(run: Run) -> dict[str, Any]:
    return await run("litellm_sdk.py")


async def test_a_conversation(report: dict[str, Any]) -> None:
    check_conversation(report["conversation"])


async def test_a_stream(report: dict[str, Any]) -> None:
    check_stream(report["stream"])


@pytest.mark.parametrize("way", ["cancel", "cancel_async"])
async def test_who_leaves_ends_the_task(
    shared_fleet: LocalFleet, report: dict[str, Any], way: str
) -> None:
    assert report[way]["state"] == "cancelled"  # while the program went on
    await check_cancelled(shared_fleet, report[way]["task_id"])


async def test_errors_are_its_own(report: dict[str, Any]) -> None:
    for case, kind, status, message in (
        ("no_model", "NotFoundError", 404, NO_MODEL),
        ("too_hot", "BadRequestError", 400, TOO_HOT),
        ("wrong_key", "AuthenticationError", 401, WRONG_KEY),
    ):
        told = report[case]
        assert told["kinds"][0] == f"litellm.exceptions.{kind}"
        assert told["status"] == status
        assert told["message"].endswith(f"OpenAIException - {message}")


async def test_it_comes_back_when_it_is_told_to(report: dict[str, Any]) -> None:
    check_limited(report["limited"])


async def test_its_other_forms(report: dict[str, Any]) -> None:
    assert report["text_completion"] == FIRST_ANSWER
    assert report["response"] == FIRST_ANSWER
