"""The README's examples, as they stand, against a running fleet."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import pytest_asyncio
import yaml
from tests.support import sse
from tests.support.local_fleet import LocalFleet, clean_environment
from tests.support.native import read, submit
from tests.support.readme import ADDRESS, README, ROOT, Block, blocks

from millstream.fleet.cli import cli, invoke as cli_invoke
from millstream.fleet.plan import choose_models
from millstream.shared.settings import Settings

MODEL = "smollm2-135m-instruct"
EXAMPLES = blocks(README.read_text("utf-8"), "sh", "python", "js")
RUN = [block for block in EXAMPLES if ADDRESS in block.text]
API_SHELL = blocks((ROOT / "docs" / "api.md").read_text("utf-8"), "sh")
API_EXAMPLES = [block for block in API_SHELL if ADDRESS in block.text]
# What starts a fleet is not started here once more; its words are checked below.
NOT_RUN = [block for block in EXAMPLES if ADDRESS not in block.text]

on_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(shared_fleet: LocalFleet) -> AsyncIterator[str]:
    """A fleet that serves the model of the examples, by the fake engine."""
    await shared_fleet.worker(model=MODEL)
    yield shared_fleet.url


def command(block: Block, folder: Path) -> list[str]:
    """How a reader would run a block; skips where this machine lacks what it takes."""
    if block.language == "python":
        script = folder / "example.py"
        words = [sys.executable, str(script)]
    elif block.language == "js":
        script = folder / "example.mjs"
        words = [needed("node"), str(script)]
        if 'from "openai"' in block.text:
            (folder / "node_modules").symlink_to(node_modules())
    else:
        needed("curl")
        script = folder / "example.sh"
        words = ["sh", str(script)]
    script.write_text(block.text, "utf-8")
    return words


def needed(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


def node_modules() -> Path:
    """Where npm's openai lies: MILLSTREAM's own tests install nothing from npm."""
    for folder in (os.environ.get("NODE_PATH", ""), "/usr/lib/node_modules"):
        if folder and (Path(folder) / "openai").is_dir():
            return Path(folder)
    pytest.skip("npm's openai is not installed (npm install -g openai, and NODE_PATH)")


async def run(block: Block, url: str, folder: Path) -> str:
    """Run a block with the address of this fleet; what it prints."""
    there = Block(block.language, block.text.replace(ADDRESS, url), block.line)
    process = await asyncio.create_subprocess_exec(
        *command(there, folder),
        env=clean_environment(),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(25):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode == 0, errors.decode()
    assert errors == b""
    return output.decode()


@on_one_loop
@pytest.mark.parametrize("block", RUN, ids=lambda block: block.name)
async def test_each_example_runs_as_it_stands(block: Block, url: str, tmp_path: Path) -> None:
    output = await run(block, url, tmp_path)
    if "/tasks/$TASK" in block.text:
        check_left_and_resumed(output)
    elif "curl" in block.text and '"stream": true' in block.text:
        assert output.startswith(": ok\n\ndata: {")
        assert output.endswith("data: [DONE]\n\n")
        assert output.count('"delta"') > 60
    elif "curl" in block.text:
        answer = json.loads(output)
        assert answer["usage"]["completion_tokens"] == 64
        assert answer["model"] == MODEL
    elif "connect_sse" in block.text:
        *_, text, status = output.splitlines()
        assert len(text.split()) == 60
        assert status == "completed"
    elif "starting_after=seen" in block.text:
        assert len(output.split()) == 60
    elif block.language == "python":
        streamed, whole = output.splitlines()
        assert len(streamed.split()) == 64
        assert whole.startswith(f"{streamed} CompletionUsage(completion_tokens=64")
    else:
        assert len(output.split()) == 64


@on_one_loop
@pytest.mark.parametrize("block", API_EXAMPLES, ids=lambda block: block.name)
async def test_each_example_of_the_api_is_answered_as_it_says(
    block: Block, url: str, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    (said,) = (other for other in blocks(page, "json") if block.line < other.line < block.line + 12)
    answer = json.loads(await run(block, url, tmp_path))
    assert list(answer) == list(json.loads(said.text))


def check_left_and_resumed(output: str) -> None:
    """Two readings of one stream, the answer to the stop, and the whole task."""
    readings, _, rest = output.partition('{"task_id"')
    first, second = readings.split(": ok\n")[1:]
    numbers = [re.findall(r"^id: (\d+)$", reading, re.MULTILINE) for reading in (first, second)]
    assert numbers[0][:3] == ["1", "2", "3"]
    assert numbers[1][:3] == ["4", "5", "6"]
    shared = [frame for frame in first.split("\n\n")[:-1] if frame.startswith("id: 4\n")]
    assert all(frame in second for frame in shared)
    stopped, end = json.JSONDecoder().raw_decode('{"task_id"' + rest)
    task = json.loads(('{"task_id"' + rest)[end:])
    assert stopped["status"] in ("cancelled", "completed")
    assert task["status"] == stopped["status"]
    assert task["usage"] == stopped["usage"]
    assert len(task["text"].split()) == task["usage"]["completion_tokens"]


@pytest.mark.asyncio
@pytest.mark.model
@pytest.mark.timeout(90)
async def test_the_first_example_tells_of_paris(fleet: LocalFleet, tmp_path: Path) -> None:
    await asyncio.gather(fleet.api(), fleet.worker(engine="transformers", within_s=60))
    output = await run(RUN[0], fleet.url, tmp_path)
    assert '"content":" Paris"' in output


async def test_the_fault_test_of_the_docs_finds_what_it_should(fleet: LocalFleet) -> None:
    (example,) = blocks((ROOT / "docs" / "testing.md").read_text("utf-8"), "python")
    names: dict[str, Any] = {
        "LocalFleet": LocalFleet, "httpx": httpx, "read": read, "signal": signal, "sse": sse,
        "submit": submit,
    }  # fmt: skip
    exec(compile(example.text, "docs/testing.md", "exec"), names)
    await names["test_a_killed_worker_costs_no_token"](fleet)


def test_the_commands_for_keys_do_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_API_KEYS_FILE", str(tmp_path / "keys"))
    texts = [block.text for block in (*NOT_RUN, *API_SHELL)]
    lines = [line for text in texts for line in text.splitlines() if "millstream keys" in line]
    assert len(lines) == 4
    for line in lines:
        assert cli_invoke(shlex.split(line, comments=True)[1:]) == 0, line


def test_what_starts_a_fleet_is_spelled_right() -> None:
    lines = [line for block in NOT_RUN for line in block.text.splitlines()]
    tools = [line.split()[1] for line in lines if line.startswith(".venv/bin/millstream ")]
    assert tools == ["chat", "top", "bench", "keys"]  # test_terminal.py runs them
    assert cli.commands.keys() >= set(tools)
    lines = [line for line in lines if not line.startswith(".venv/bin/millstream ")]
    assert [line.split()[0] for line in lines] == [
        "git", "make", "make", "make", *["docker-compose"] * 3, "export", "make",
    ]  # fmt: skip
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert "run" in targets
    assert {line.split()[1] for line in lines if line.startswith("make")} == {"run"}
    options = re.search(r'\bARGS="([^"]*)"', "\n".join(lines))
    assert options is not None
    up = cli.commands["up"].make_context("up", options[1].split())
    assert isinstance(up, click.Context)
    names = [model.name for model in choose_models(up.params["models"], Settings.model_construct())]
    assert (names, up.params["workers"]) == (["small", "large"], 2)
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
    assert "worker" in compose["services"]
    assert "gpu" in compose["services"]["worker-gpu"]["profiles"]
