"""`millstream dead`: real poison tasks, listed, shown, tried again and dropped."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.local_fleet import LocalFleet
from tests.support.native import read, submit
from tests.support.store import Store
from tests.support.waiting import eventually

from millstream.fleet.cli import invoke
from millstream.fleet.state_folder import StateFolder, default_state_folder
from millstream.shared.dead_letters import DeadLetters
from millstream.shared.errors import QueueFull


class Dead:
    """The command, and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    async def __call__(self, *arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(invoke, ["dead", *arguments])
        out, error = self._capsys.readouterr()
        return code, out, error

    async def listed(self, *arguments: str) -> list[dict[str, Any]]:
        code, out, _ = await self("list", "--json", *arguments)
        assert code == 0
        return json.loads(out)


async def test_poison_tasks_are_looked_after(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MILLSTREAM_REDIS_URL", fleet.redis_url)
    dead = Dead(capsys)
    assert await dead("list") == (0, "No dead letters.\n", "")
    settings = {"lease_s": 1, "max_attempts": 1}
    api = await fleet.api(keepalive_s=0.5)
    first = await fleet.worker(**settings)
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        poison = await submit(http, "drink me", tokens=9, crash_at=3)
        assert await first.ended() == 70
        await fleet.worker(**settings)
        bad = await submit(http, "eat me", error_at=2)
        ends = {task: (await read(http, task))[-1].json for task in (poison, bad)}
        assert {end["error"]["code"] for end in ends.values()} == {"max_attempts"}

        by_id = {row["task_id"]: row for row in await dead.listed()}
        assert set(by_id) == {poison, bad}
        for task_id, end in ends.items():
            assert by_id[task_id]["attempts"] == 1
            assert by_id[task_id]["error"] == end["error"]["message"]
        assert await dead.listed("other") == []
        _, table, _ = await dead("list", "fake")
        head, *lines = table.splitlines()
        assert head.split() == ["TASK", "MODEL", "ATTEMPTS", "FAILED", "PROMPT"]
        assert {line.split()[0] for line in lines} == {poison, bad}

        code, out, _ = await dead("show", poison, "--json")
        shown = json.loads(out)
        assert code == 0
        assert shown["request"]["prompt"].endswith("drink me")
        assert shown["text"] == (await http.get(f"/tasks/{poison}")).json()["text"]
        assert "drink me" in (await dead("show", poison))[1]

        unknown = "millstream: no dead letter t0-x; `millstream dead list` shows all\n"
        for command in ("show", "retry", "drop"):
            assert await dead(command, "t0-x") == (1, "", unknown)
        for arguments in (["retry"], ["drop", poison, "--all"]):
            code, _, error = await dead(*arguments)
            assert (code, "Give ids, or --all." in error) == (2, True)
        assert len(await dead.listed()) == 2

        # Tried again, it fails again: a new task, and a letter of its own.
        code, out, _ = await dead("retry", bad)
        new = out.split()[-1]
        assert (code, out) == (0, f"{bad} runs again as {new}\n")
        assert (await read(http, new))[-1].json["error"]["code"] == "max_attempts"
        assert {row["task_id"] for row in await dead.listed()} == {poison, new}
        assert (await http.get(f"/tasks/{bad}")).json()["status"] == "failed"  # its log stays

        assert await dead("drop", new) == (0, f"{new} dropped\n", "")
        assert await dead("drop", "--all", "--model", "other") == (0, "", "")
        assert await dead("drop", "--all") == (0, f"{poison} dropped\n", "")
        assert await dead("list") == (0, "No dead letters.\n", "")
    await fleet.quiet()


async def test_a_letter_is_never_lost_and_never_tried_twice(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await fleet.api()
    await fleet.worker(max_attempts=1)
    async with httpx.AsyncClient(base_url=api.url, timeout=25) as http:
        await read(http, await submit(http, error_at=1))
        letters = DeadLetters(fleet.redis, fleet.scripts)
        (letter,) = await letters.read()
        with pytest.raises(QueueFull):
            await letters.retry(letter, max_queue=0, live_ttl_s=60)
        assert await letters.read() == [letter]
        # Whoever is first has it, and a call sent again after a lost answer changes nothing.
        new = "t0-" + "a" * 26
        monkeypatch.setattr("millstream.shared.dead_letters.new_task_id", lambda _: new)
        answers = [await letters.retry(letter, max_queue=9, live_ttl_s=60) for _ in range(2)]
        assert answers == [new, new]
        monkeypatch.undo()
        assert await letters.retry(letter, max_queue=9, live_ttl_s=60) is None
        assert not await letters.drop(letter)

        async def back() -> bool:
            return [one.task_id for one in await letters.read()] == [new]

        await eventually(back, what="the one new task to fail")
        assert await letters.drop((await letters.read())[0])
    await fleet.quiet()


async def test_the_fleet_of_up_is_found(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nobody has to know where its database listens."""
    monkeypatch.delenv("MILLSTREAM_REDIS_URL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "s"))
    code, _, error = await Dead(capsys)("list")
    assert code == 1
    assert "no fleet of `millstream up` is here, so set MILLSTREAM_REDIS_URL to yours" in error
    socket = StateFolder(default_state_folder()).socket
    socket.parent.mkdir(parents=True, exist_ok=True)
    socket.symlink_to(store.socket)
    assert await Dead(capsys)("list") == (0, "No dead letters.\n", "")
