"""`millstream chat`, `top` and `bench` against a real fleet, on pipes and in a terminal."""

import asyncio
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.support.local_fleet import LocalFleet, clean_environment, within
from tests.support.ports import free_port
from tests.support.waiting import eventually

from millstream.shared.keys import Keys

COMMAND = [sys.executable, "-m", "millstream"]
TERMINAL = {"TERM": "xterm", "COLUMNS": "160", "LINES": "40", "PYTHONFAULTHANDLER": "1"}


async def _run(*arguments: str, stdin: str = "", **settings: object) -> tuple[int, str, str]:
    """A command with its input from a pipe: exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(**settings),
    )
    out, err = await within(25, process.communicate(stdin.encode()))
    return process.returncode or 0, out.decode(), err.decode()


async def test_a_question_from_a_pipe(fleet: LocalFleet) -> None:
    api, _ = await asyncio.gather(fleet.api(), fleet.worker())
    question = '@fake {"texts": ["It", " is", " \\u001b[31mred"], "tokens": 3}'
    code, out, err = await _run("chat", "--url", api.url, stdin=question)
    assert (code, out, err) == (0, "It is \x1b[31mred\n", "")  # a pipe gets what the model wrote
    code, out, err = await _run("chat", "nobody", "--url", api.url, stdin="hi")
    assert (code, out) == (1, "")
    assert err == "millstream: The model 'nobody' does not exist.\n"
    code, out, err = await _run("chat", "--url", api.url)
    assert (code, err) == (1, "millstream: there is no question: stdin is empty\n")
    url = f"http://127.0.0.1:{free_port()}"
    code, out, err = await _run("chat", "--url", url, stdin="hi")
    assert (code, out) == (1, "")
    assert err.startswith(f"millstream: nobody answers at {url}")


async def test_a_command_says_where_its_key_goes(fleet: LocalFleet) -> None:
    key = "k" * 40
    api = await fleet.api(api_keys=key)
    for command in ("chat", "top", "bench"):
        code, out, err = await _run(command, "--url", api.url, stdin="hi")
        assert (code, out) == (1, "")
        assert err.endswith("A command takes the key from MILLSTREAM_API_KEY.\n")
        assert err.count("\n") == 1
    code, _, err = await _run("chat", "--url", api.url, stdin="hi", api_key=key[:-1])
    assert (code, "A command takes the key from MILLSTREAM_API_KEY." in err) == (1, True)
    assert key[:-1] not in err


async def test_an_answer_survives_worker_and_pod(fleet: LocalFleet) -> None:
    api, _, _ = await asyncio.gather(fleet.api(), fleet.worker(), fleet.worker())
    texts = [f" w{at}" for at in range(60)]
    question = "@fake " + json.dumps({"texts": texts, "tokens": 60, "rate": 20})
    asking = asyncio.create_task(_run("chat", "--url", api.url, stdin=question))
    task_id = await _only_task(fleet)
    await eventually(lambda: _length(fleet, task_id, 10), what="some tokens")
    (await fleet.owner(task_id)).signal(signal.SIGKILL)
    api.signal(signal.SIGKILL)
    await api.ended()
    await fleet.api(port=api.url.rpartition(":")[2])
    away = "millstream: The fleet cannot be reached; trying again\n"
    assert await asking == (0, "".join(texts) + "\n", away)
    fields = await fleet.scripts.task_fields(Keys(0), task_id)
    assert fields["attempt"] == "2"


async def test_ctrl_c_stops_the_answer_and_not_the_program(fleet: LocalFleet) -> None:
    api, _ = await asyncio.gather(fleet.api(), fleet.worker())

    async def served() -> bool:
        return (await asyncio.to_thread(httpx.get, f"{api.url}/v1/models")).json()["data"] != []

    await eventually(served, what="the model")
    with _terminal("chat", "--url", api.url) as (process, master):
        screen = _Screen(master)
        await screen.shows(f"fake, temperature 0.7 at {api.url}. /help, Ctrl-D leaves.\n> ")
        os.write(master, b'@fake {"tokens": 10000, "rate": 20}\n')
        task_id = await _only_task(fleet)
        await eventually(lambda: _length(fleet, task_id, 3), what="some tokens")
        os.write(master, b"\x03")
        await screen.shows("(stopped)")
        fields = await fleet.scripts.task_fields(Keys(0), task_id)
        assert fields["state"] == "cancelled"
        assert process.poll() is None
        os.write(master, b'@fake {"texts": ["still \\u001b[31mhere"], "tokens": 1}\n')
        await screen.shows("\nstill [31mhere")  # in a terminal, no control characters
        os.write(master, b"\x04")
        await screen.ends(process)


@pytest.mark.parametrize(
    ("by", "codes"),
    [("SIGTERM", {143}), ("pipe", {1}), ("terminal", {129, 1})],  # it may write before SIGHUP comes
)
async def test_an_answer_ends_with_its_reader(fleet: LocalFleet, by: str, codes: set[int]) -> None:
    """Told to go, nobody at the other end of its pipe, its terminal closed: none decodes on."""
    api, _ = await asyncio.gather(fleet.api(), fleet.worker())
    arguments = ("chat", "--url", api.url)
    question = b'@fake {"tokens": 10000, "rate": 20}\n'
    opened = _terminal(*arguments) if by == "terminal" else _piped(question, *arguments)
    with opened as (chat, end):
        if by == "terminal":
            await _Screen(end).shows("> ")
            os.write(end, question)
        task_id = await _only_task(fleet)
        await eventually(lambda: _length(fleet, task_id, 3), what="some tokens")
        if by == "SIGTERM":
            chat.terminate()
        else:
            _hang_up(end)
        assert await asyncio.to_thread(chat.wait, 10) in codes
    assert (await fleet.scripts.task_fields(Keys(0), task_id))["state"] == "cancelled"


async def test_who_is_refused_is_told_and_can_leave(fleet: LocalFleet) -> None:
    api, _ = await asyncio.gather(fleet.api(rate_limit_requests_per_min=1), fleet.worker())
    question = '@fake {"tokens": 1}\n'
    assert (await _run("chat", "--url", api.url, stdin=question))[0] == 0
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "chat", "--url", api.url,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=clean_environment(),
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(question.encode())
    process.stdin.close()
    line = (await within(20, process.stderr.readline())).decode()
    assert line.startswith("millstream: Rate limit reached: ")
    assert "Trying again in " in line
    process.send_signal(signal.SIGINT)
    assert await within(3, process.wait()) == 130
    with _terminal("chat", "--url", api.url) as (chat, master):
        screen = _Screen(master)
        await screen.shows("> ")
        os.write(master, question.encode())
        await screen.shows("Trying again in ")
        os.write(master, b"\x03")
        await within(3, screen.shows("(stopped)"))
        os.write(master, b"\x04")
        await screen.ends(chat)


async def test_a_fleet_that_has_gone_can_be_left(fleet: LocalFleet) -> None:
    api, _ = await asyncio.gather(fleet.api(), fleet.worker())
    with _terminal("chat", "--url", api.url) as (chat, master):
        screen = _Screen(master)
        await screen.shows("> ")
        os.write(master, b'@fake {"tokens": 10000, "rate": 20}\n')
        task_id = await _only_task(fleet)
        await eventually(lambda: _length(fleet, task_id, 3), what="some tokens")
        api.signal(signal.SIGSTOP)
        os.write(master, b"\x03")
        await screen.shows("stopping it; Ctrl-C leaves it")
        os.write(master, b"\x03")
        await within(3, screen.shows("(stopped)"))
        os.write(master, b"\x04")
        await screen.ends(chat)


async def test_top(fleet: LocalFleet) -> None:
    api, worker = await asyncio.gather(fleet.api(), fleet.worker())
    code, out, _ = await _run("top", "--url", api.url)
    assert code == 0
    (row,) = [line for line in out.splitlines() if f"-{worker.pid}-" in line]
    assert row.split()[1:3] == ["fake", "ready"]
    assert "   Valkey 9." in out
    code, out, _ = await _run("top", "--json", url=api.url)
    assert json.loads(out)["workers"][0]["pid"] == worker.pid
    code, out, err = await _run("top", url="http://127.0.0.1:1")
    assert (code, out) == (1, "")
    assert err.startswith("millstream: nobody answers at http://127.0.0.1:1")
    with _terminal("top", "--url", api.url) as (process, master):
        screen = _Screen(master)
        await screen.shows("ready")
        worker.signal(signal.SIGKILL)
        await screen.shows("0/0 workers")
        os.write(master, b"q")
        await screen.ends(process)
    with _terminal("top", "--url", api.url) as (process, master):
        screen = _Screen(master)
        await screen.shows("0/0 workers")
        os.write(master, b"\x03")
        await screen.ends(process)


async def test_bench(fleet: LocalFleet, tmp_path: Path) -> None:
    api, _ = await asyncio.gather(fleet.api(max_queue=0), fleet.worker())
    arguments = ["bench", "--url", api.url, "--num-prompts", "12", "--output-len", "5"]
    arguments += ["--input-len", "9", "--json", str(tmp_path / "b.json")]
    code, out, err = await _run(*arguments, "--max-concurrency", "3")
    figures = json.loads((tmp_path / "b.json").read_text())
    assert figures["failed"] == 12
    assert figures["errors"] == {"503 queue_full": 12}
    assert code == 1, err
    second = await fleet.api()
    arguments[2] = second.url
    code, out, err = await _run(*arguments, "--max-concurrency", "3")
    line = f"12 requests for fake at {second.url}, 3 at once at the most\n"
    assert (code, err) == (0, line)
    figures = json.loads((tmp_path / "b.json").read_text())
    assert figures["completed"] == 12
    assert figures["total_output_tokens"] == 60
    assert figures["max_concurrent_requests"] == 3
    assert 0 < figures["p50_ttft_ms"] <= figures["p50_e2el_ms"]
    assert "12 completed, 0 failed" in out
    code, out, err = await _run("bench", "--url", api.url, "--mix", "0", "1", "1")
    assert code == 2


async def _only_task(fleet: LocalFleet) -> str:
    async def look() -> str | None:
        names = [key async for key in fleet.redis.scan_iter("{ms:0}:task:*")]
        return names[0].decode().rpartition(":")[2] if names else None

    return await eventually(look, what="the task")


async def _length(fleet: LocalFleet, task_id: str, least: int) -> bool:
    return await fleet.redis.xlen(Keys(0).log(task_id)) >= least


@contextmanager
def _piped(stdin: bytes, *arguments: str) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A command that has had its input from a pipe, and the end of the one that it writes to."""
    end, writes = os.pipe()
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdin=subprocess.PIPE, stdout=writes, env=clean_environment()
    )
    os.close(writes)
    assert process.stdin is not None
    process.stdin.write(stdin)
    process.stdin.close()
    try:
        yield process, end
    finally:
        process.kill()
        process.wait(10)
        os.close(end)


@contextmanager
def _terminal(*arguments: str) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A command in a terminal of its own."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**clean_environment(), **TERMINAL},
        preexec_fn=_take_terminal,  # noqa: PLW1509 - no threads here; a session of its own, then this
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield process, master
    finally:
        process.kill()
        process.wait(10)
        os.close(master)


def _hang_up(end: int) -> None:
    """Nobody is there any more; the number stays taken, so that it is nobody else's yet."""
    nobody = os.open(os.devnull, os.O_RDWR)
    os.dup2(nobody, end)
    os.close(nobody)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C typed there is a SIGINT
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a shell's background jobs ignore


class _Screen:
    """What a terminal has shown."""

    def __init__(self, master: int) -> None:
        self._master = master
        self._shown = ""
        os.set_blocking(master, False)

    async def shows(self, text: str) -> None:
        """Wait for a text after what was waited for before."""

        async def look() -> bool:
            self._read()
            return text in self._shown

        try:
            await eventually(look, within_s=15, what=repr(text))
        except AssertionError:
            pytest.fail(f"{text!r} is not in {self._shown[-2000:]!r}")
        self._shown = self._shown.partition(text)[2]

    async def ends(self, process: "subprocess.Popen[bytes]") -> None:
        """Wait for the end of the program, which could not write to a terminal nobody reads."""

        async def look() -> bool:
            self._read()
            return process.poll() is not None

        try:
            await eventually(look, what="end of the program")
        except AssertionError:
            process.send_signal(signal.SIGABRT)  # so that it tells where it is
            await eventually(look, what="end of the program, after SIGABRT")
        assert process.poll() == 0, self._shown[-4000:]

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # nothing there, or nobody any more
            while piece := os.read(self._master, 65536):
                self._shown += piece.decode(errors="replace").replace("\r\n", "\n")
