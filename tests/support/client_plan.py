"""What each foreign client is to do, and what it must see: the same for all of them."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.support.local_fleet import LocalFleet
from tests.support.waiting import eventually

from millstream.shared.schemas import Message
from millstream.worker.engines.fake_script import FakeTokenizer, read_script

PROGRAM_S = 240
KEY = "key-of-ann-0123456789"

FIRST = '@fake {"texts": ["The capital", " is", " Paris."]}\nWhat is the capital of France?'
FIRST_ANSWER = "The capital is Paris."
SECOND = "And that of Spain?"
STREAMED = '@fake {"texts": ["One,", " two,", " three."]}\nCount to three.'
STREAMED_ANSWER = "One, two, three."
CONVERSATION = [Message("user", FIRST), Message("assistant", FIRST_ANSWER), Message("user", SECOND)]
NO_MODEL = "The model 'gpt-9' does not exist."
TOO_HOT = "Invalid value for temperature: Input should be less than or equal to 2."
WRONG_KEY = "Incorrect API key provided."


def said(conversation: Sequence[Message]) -> str:
    """What the fake engine answers: it depends on every word that came before."""
    tokenizer = FakeTokenizer()
    script = read_script(tokenizer.encode_chat(conversation), None)
    return tokenizer.decode([script.token_at(position) for position in range(script.tokens)])


def size_of(conversation: Sequence[Message]) -> int:
    """Its tokens, as `usage` counts them."""
    return len(FakeTokenizer().encode_chat(conversation))


@dataclass(frozen=True)
class Plan:
    """What a client's program is told."""

    open_url: str
    """A pod that asks for no key."""
    keyed_url: str
    """A pod of the same fleet that does, and lets the key have one stream at a time."""
    key: str = KEY
    model: str = "fake"
    first: str = FIRST
    second: str = SECOND
    streamed: str = STREAMED
    endless: str = '@fake {"tokens": 100000, "rate": 50}\nTell me all.'


async def make_plan(fleet: LocalFleet) -> Plan:
    """The plan for a fleet, to which a pod with keys is added."""
    keyed = await fleet.api(api_keys=f"ann:{KEY}", rate_limit_concurrent_streams=1)
    return Plan(fleet.url, keyed.url)


def run_program(command: Sequence[str | Path], plan: Plan, home: Path) -> dict[str, Any]:
    """What a client's program reports: JSON in its last line.

    Args:
        command: The program.
        plan: What it reads from its standard input.
        home: Where it may leave what it keeps for its user.
    """
    done = subprocess.run(  # noqa: PLW1510 - judged by what it said
        command,
        input=json.dumps(asdict(plan)),
        env=quiet_environment(home),
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def quiet_environment(home: Path) -> dict[str, str]:
    """An environment in which no client finds a user's settings, or talks to its makers."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(home),
        "LLM_USER_PATH": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
        "AI_SDK_LOG_WARNINGS": "false",
        "NO_PROXY": "*",
        "PYTHONUTF8": "1",
    }


def check_conversation(report: Any) -> None:
    """Two turns, the second of which the engine saw whole."""
    assert report["texts"] == [FIRST_ANSWER, said(CONVERSATION)]
    assert report["prompt_tokens"] == [size_of(CONVERSATION[:1]), size_of(CONVERSATION)]


def check_stream(report: Any, *, finish_reason: str | None = "stop") -> None:
    """All of a stream: its text, in its pieces, its end and what it cost."""
    assert [piece for piece in report["pieces"] if piece] == ["One,", " two,", " three."]
    assert report["finish_reason"] == finish_reason
    assert report["usage"] == [size_of([Message("user", STREAMED)]), 3]


async def check_cancelled(fleet: LocalFleet, task_id: str) -> None:
    """A task that was abandoned has ended, with what it had said, and its slot is free."""
    async with httpx.AsyncClient(base_url=fleet.url) as http:

        async def ended() -> dict[str, Any] | None:
            task = (await http.get(f"/tasks/{task_id}")).json()
            return None if task["status"] in ("queued", "running") else task

        task = await eventually(ended, what="end of the task")
        assert task["status"] == "cancelled"
        assert 3 <= task["usage"]["completion_tokens"] < 100_000
    await fleet.quiet()


def check_limited(report: Any) -> None:
    """It was refused, told to come back after a second, and then got its answer."""
    assert report["text"] == STREAMED_ANSWER
    assert len(report["refusals"]) >= 1
    assert set(report["refusals"]) == {"1"}
