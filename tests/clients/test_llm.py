"""The `llm` command against a fleet, by its setting for OpenAI-compatible servers."""

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.support.client_environment import ClientEnvironment
from tests.support.client_plan import (
    CONVERSATION,
    FIRST,
    FIRST_ANSWER,
    KEY,
    NO_MODEL,
    SECOND,
    STREAMED,
    STREAMED_ANSWER,
    WRONG_KEY,
    Plan,
    check_cancelled,
    check_conversation,
    quiet_environment,
    said,
    size_of,
)
from tests.support.local_fleet import LocalFleet

from millstream.shared.schemas import Message

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120, func_only=True)]


class Command:
    """`llm` with a folder of settings."""

    def __init__(self, program: Path, home: Path) -> None:
        self._program = program
        self._environment = quiet_environment(home)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [self._program, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    async def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        process = self.start(*arguments)
        output, errors = await asyncio.to_thread(process.communicate, timeout=90)
        return process.returncode, output.decode().strip(), errors.decode().strip()


@pytest.fixture(scope="module")
def llm(clients: ClientEnvironment, plan: Plan, home: Path) -> Command:
    served = {"model_name": plan.model, "api_base": f"{plan.open_url}/v1"}
    models = [
        {"model_id": "mill", **served},
        {"model_id": "mill-responses", **served, "responses": True},
        {"model_id": "mill-absent", **served, "model_name": "gpt-9"},
        {
            "model_id": "mill-keyed",
            **served,
            "api_base": f"{plan.keyed_url}/v1",
            "api_key_name": "mill",
        },
    ]
    (home / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))
    return Command(clients.command("llm"), home)


async def test_a_conversation(llm: Command) -> None:
    assert await llm("-m", "mill", FIRST) == (0, FIRST_ANSWER, "")
    assert await llm("-c", SECOND) == (0, said(CONVERSATION), "")
    code, logs, _ = await llm("logs", "list", "--json", "-n", "2")
    assert code == 0
    turns = json.loads(logs)
    check_conversation(
        {
            "texts": [turn["response"] for turn in turns],
            "prompt_tokens": [turn["input_tokens"] for turn in turns],
        }
    )
    assert [turn["response_json"]["finish_reason"] for turn in turns] == ["stop", "stop"]


async def test_a_conversation_by_responses(llm: Command) -> None:
    assert await llm("-m", "mill-responses", FIRST) == (0, FIRST_ANSWER, "")
    assert await llm("-c", SECOND) == (0, said(CONVERSATION), "")


async def test_a_stream_with_a_key(llm: Command) -> None:
    """It streams unless told otherwise; `-u` says what it cost."""
    told = await llm("-m", "mill-keyed", "--key", KEY, "-u", STREAMED)
    size = size_of([Message("user", STREAMED)])
    assert told == (0, STREAMED_ANSWER, f"Token usage: {size} input, 3 output")


async def test_ctrl_c_ends_the_task(shared_fleet: LocalFleet, plan: Plan, llm: Command) -> None:
    before = {key async for key in shared_fleet.redis.scan_iter("*:task:*")}
    process = llm.start("-m", "mill", plan.endless)
    try:
        assert process.stdout is not None
        text = b""
        while text.count(b" ") < 4:
            text += await asyncio.to_thread(os.read, process.stdout.fileno(), 1024)
        process.send_signal(signal.SIGINT)
        await asyncio.to_thread(process.communicate, timeout=30)
    finally:
        process.kill()
    (new,) = {key async for key in shared_fleet.redis.scan_iter("*:task:*")} - before
    await check_cancelled(shared_fleet, new.decode().rpartition(":")[2])


async def test_errors_are_told_in_a_line(llm: Command) -> None:
    for arguments, message in (
        (("-m", "mill-absent", "x"), f"404 - {NO_MODEL}"),
        (
            ("-m", "mill", "-o", "max_tokens", "0", "x"),
            "400 - Invalid value for max_tokens: Input should be greater than or equal to 1.",
        ),
        (("-m", "mill-keyed", "--key", "none", "x"), f"401 - {WRONG_KEY}"),
    ):
        assert await llm(*arguments) == (1, "", f"Error: Error code: {message}")
