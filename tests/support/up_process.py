"""`millstream up` as its user runs it: a real process, its output through pipes."""

import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil
from tests.support.local_fleet import clean_environment
from tests.support.waiting import eventually

_TEST_MARK = "TEST_UP_MARK"


class UpProcess:
    """One `millstream up` with the fake engine; whatever it started is found by its environment.

    `hook` is the text of a sitecustomize module that all its Python processes run, to make one of
    them misbehave.
    """

    def __init__(
        self, folder: Path, *options: str, hook: str = "", engine: str = "fake", **settings: object
    ) -> None:
        self.mark = secrets.token_hex(8)
        self.folder = folder
        environment = clean_environment(**{"lease_s": 2, "drain_s": 5, **settings})
        environment |= {_TEST_MARK: self.mark, "XDG_STATE_HOME": str(folder / "state")}
        if hook:
            place = folder / f"hook-{self.mark}"
            place.mkdir()
            (place / "sitecustomize.py").write_text(hook)
            path = environment.get("PYTHONPATH", "")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(place), path]))
        if "--port" not in options:
            options = ("--port", "0", *options)
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "millstream", "up", "--engine", engine, *options],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._readers = [
            threading.Thread(target=lines.extend, args=[stream])
            for lines, stream in (
                (self.stdout, self.popen.stdout),
                (self.stderr, self.popen.stderr),
            )
        ]
        for reader in self._readers:
            reader.start()

    async def __aenter__(self) -> "UpProcess":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGKILL)
            self.popen.wait(10)
        if kind is not None:
            print("".join(["--- stdout\n", *self.stdout, "--- stderr\n", *self.stderr]))  # noqa: T201
        try:
            await self.nothing_left()
        finally:
            for process in self.processes():
                process.kill()
            for reader in self._readers:
                reader.join(10)
            for stream in (self.popen.stdout, self.popen.stderr):
                if stream is not None:
                    stream.close()

    def processes(self) -> list[psutil.Process]:
        """All that lives of what this command started, itself included."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get(_TEST_MARK) == self.mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def children(self, words: str) -> list[psutil.Process]:
        """The processes whose command line has these words, in order of age."""
        found = []
        for process in self.processes():
            try:
                if words in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return sorted(found, key=lambda process: process.create_time())

    @property
    def workers(self) -> list[psutil.Process]:
        return self.children("-m millstream worker")

    @property
    def apis(self) -> list[psutil.Process]:
        return self.children("-m millstream api")

    @property
    def valkeys(self) -> list[psutil.Process]:
        return [process for process in self.processes() if process.name() == "valkey-server"]

    @property
    def guards(self) -> list[psutil.Process]:
        return self.children("lifeline.py guard")

    async def ready(self, within_s: float = 20) -> str:
        """Wait for the announcement; the URL in it."""
        line = await self.says(r"ready at http", within_s=within_s)
        return re.findall(r"http://[^ ]*\d", line)[0]

    async def says(
        self, pattern: str, *, within_s: float = 15, after: int = 0, error: bool = False
    ) -> str:
        """Wait for a line, at place `after` or later, that matches."""
        lines = self.stderr if error else self.stdout

        async def look() -> str | None:
            found = [line for line in lines[after:] if re.search(pattern, line)]
            if not found:
                assert self.popen.poll() is None, "".join(self.stdout + self.stderr)
            return found[0] if found else None

        return await eventually(look, within_s=within_s, what=f"a line with {pattern!r}") or ""

    async def becomes(self, condition: Callable[[], object], what: str) -> None:
        """Wait until something holds."""

        async def look() -> bool:
            return bool(condition())

        await eventually(look, within_s=15, what=what)

    async def ended(self, within_s: float = 12) -> int:
        """Wait for the end of the command; its exit code."""

        async def look() -> bool:
            return self.popen.poll() is not None

        await eventually(look, within_s=within_s, what="end of `millstream up`")
        await asyncio.to_thread(lambda: [reader.join(5) for reader in self._readers])
        return self.popen.returncode

    async def nothing_left(self, within_s: float = 9) -> None:
        """Wait until no process that this command started lives."""

        async def look() -> bool:
            return not self.processes()

        await eventually(look, within_s=within_s, what=f"end of {self.processes()}")


async def ask(url: str, model: str | None = None) -> str:
    """The answer to a short chat."""
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
    }
    if model:
        body["model"] = model
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def submit(url: str, **body: object) -> str:
    """Hand a task in; its id."""
    return httpx.post(f"{url}/tasks", json=body, timeout=5).raise_for_status().json()["task_id"]


def read_task(url: str, task_id: str) -> dict[str, Any]:
    """A task as it is now; nothing else runs on the loop of these tests."""
    return httpx.get(f"{url}/tasks/{task_id}", timeout=5).raise_for_status().json()


async def finished_task(url: str) -> str:
    """The id of a task that has been completed."""
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        answer = await client.post("/tasks", json={"prompt": "Hello", "max_tokens": 4})
        task_id = answer.json()["task_id"]
        async with client.stream("GET", f"/tasks/{task_id}/stream") as stream:
            assert "event: completed" in "".join([text async for text in stream.aiter_text()])
    return task_id
