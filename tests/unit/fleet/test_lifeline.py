"""The two small programs that hold a fleet together."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from millstream.fleet import lifeline

PROGRAM = [sys.executable, "-I", "-S", lifeline.__file__]
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux's")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 8
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_hold_becomes_the_command_with_its_process_id() -> None:
    command = ["/bin/sh", "-c", "echo $$; exit 7"]
    with subprocess.Popen(
        [*PROGRAM, "hold", str(os.getpid()), *command], stdout=subprocess.PIPE, text=True
    ) as process:
        out, _ = process.communicate(timeout=10)
    assert (int(out), process.returncode) == (process.pid, 7)


def test_hold_starts_nothing_for_a_parent_that_is_gone() -> None:
    command = [*PROGRAM, "hold", "1", "/bin/echo", "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (1, b"")


@linux
def test_hold_ends_the_command_with_its_parent(tmp_path: Path) -> None:
    sleeper = [*PROGRAM, "hold", "{parent}", "/bin/sleep", "60"]
    code = f"""
import os, subprocess, time
command = [word.format(parent=os.getpid()) for word in {sleeper!r}]
print(subprocess.Popen(command).pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        held = psutil.Process(int(parent.stdout.readline()))
        until(lambda: held.name() == "sleep")
        parent.kill()
    until(lambda: not lifeline.alive(held.pid))


def test_the_guard_ends_with_its_command_and_its_code() -> None:
    guard = [*PROGRAM, "guard", "unused", "1"]
    for script, code in (("exit 3", 3), ("kill -9 $$", 137)):
        with subprocess.Popen([*guard, "/bin/sh", "-c", script], stdin=subprocess.PIPE) as process:
            assert process.wait(10) == code


def test_the_guard_outlives_signals_and_ends_those_it_watches(tmp_path: Path) -> None:
    mark = str(tmp_path)
    ended = tmp_path / "ended"
    database = f"trap 'touch {ended}; exit' TERM; while :; do sleep 0.05; done"
    deaf = "trap '' TERM; echo ready; while :; do sleep 1; done"
    with (
        subprocess.Popen(
            ["/bin/sh", "-c", deaf], start_new_session=True, stdout=subprocess.PIPE
        ) as watched,
        subprocess.Popen(["/bin/sleep", "60"], start_new_session=True) as forgotten,
        subprocess.Popen(
            ["/bin/sleep", "60"],
            start_new_session=True,
            env={lifeline.MARK: mark},
        ) as stray,
        subprocess.Popen(
            [*PROGRAM, "guard", mark, "0.3", "/bin/sh", "-c", database],
            stdin=subprocess.PIPE,
            env={**os.environ, lifeline.MARK: mark},
        ) as guard,
    ):
        assert watched.stdout is not None
        assert watched.stdout.readline() == b"ready\n"
        assert guard.stdin is not None
        guard.stdin.write(f"+{watched.pid}\n+{forgotten.pid}\n-{forgotten.pid}\n".encode())
        guard.stdin.flush()
        until(lambda: len(psutil.Process(guard.pid).children()) == 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            guard.send_signal(number)
        assert guard.poll() is None
        guard.stdin.close()
        assert watched.wait(10) == -signal.SIGKILL
        assert guard.wait(10) == 0
        assert ended.exists()
        if sys.platform == "linux":
            assert stray.wait(10) == -signal.SIGKILL
        assert forgotten.poll() is None
        forgotten.kill()
        stray.kill()


def test_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen(["/bin/true"])
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert lifeline.alive(process.pid) is (sys.platform != "linux")
    process.wait()
    assert not lifeline.alive(process.pid)


def test_wrong_arguments() -> None:
    assert lifeline.main(["hold", "1"]) == 2
    assert lifeline.main([]) == 2
