"""The processes of a benchmark: started and ended with it, and what each has used so far."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import psutil
from tests.support.local_fleet import clean_environment
from tests.support.ports import free_port
from tests.support.store import wait_for_answer

from millstream.fleet.embedded import find_binary, server_command
from millstream.fleet.state_folder import StateFolder

ROOT = Path(__file__).parents[2]
UP_S = 60.0


class Started:
    """A process and its children, whose use of the machine is read from /proc."""

    def __init__(self, popen: subprocess.Popen[bytes], port: int) -> None:
        self.popen = popen
        self.port = port

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far."""
        return cpu_s(self.popen.pid)

    def memory_mb(self) -> float:
        """Resident memory."""
        pids = _with_children(self.popen.pid)
        return sum(psutil.Process(pid).memory_info().rss for pid in pids) / 2**20

    def end(self) -> None:
        """Kill it, with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(10)


def as_installed() -> dict[str, str]:
    """The environment in which starts are measured: Python keeps what it has compiled.

    So it does for whoever installs Millstream. Where it is told not to, each process compiles
    Millstream's modules anew, and no other's: pip has compiled those.
    """
    environment = clean_environment()
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children so far, to the nanosecond: ticks would be 10 ms."""
    spent = 0
    for each in _with_children(pid):
        for thread in Path(f"/proc/{each}/task").iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile
                spent += int((thread / "schedstat").read_text().split()[0])
    return spent / 1e9


def _with_children(pid: int) -> list[int]:
    root = psutil.Process(pid)
    return [pid, *(child.pid for child in root.children(recursive=True))]


@contextlib.contextmanager
def started(
    command: Sequence[str],
    port: int,
    *,
    log: Path | None = None,
    cwd: Path | None = None,
    up_s: float = UP_S,
    **environment: str,
) -> Generator[Started]:
    """A process that listens on a port, in a session of its own so that all of it can be ended.

    Raises:
        TimeoutError: it does not listen within `up_s`, or has ended.
    """
    with contextlib.ExitStack() as stack:
        sink = subprocess.DEVNULL if log is None else stack.enter_context(log.open("wb"))
        popen = subprocess.Popen(
            command, stdout=sink, stderr=sink, start_new_session=True, cwd=cwd,
            env=clean_environment() | environment,
        )  # fmt: skip
        process = Started(popen, port)
        stack.callback(process.end)
        deadline = time.monotonic() + up_s
        while not _listens(port):
            if popen.poll() is not None or time.monotonic() > deadline:
                told = log.read_text(errors="replace")[-300:] if log else ""
                raise TimeoutError(f"{command[0]} does not listen: {told}")
            time.sleep(0.05)
        yield process


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


class Valkey(Started):
    """A store, which has a URL and no port."""

    def __init__(self, popen: subprocess.Popen[bytes], url: str) -> None:
        super().__init__(popen, 0)
        self.url = url


@contextlib.contextmanager
def valkey() -> Generator[Valkey]:
    """The Valkey of `millstream up`: its file is written, and it is reached by its socket."""
    with tempfile.TemporaryDirectory() as folder:
        state = StateFolder(Path(folder))
        state.data.mkdir()
        popen = subprocess.Popen(
            server_command(find_binary(), state), stdout=subprocess.DEVNULL, start_new_session=True
        )
        store = Valkey(popen, state.redis_url)
        try:
            wait_for_answer(popen, store.url)
            yield store
        finally:
            store.end()


@contextlib.contextmanager
def pod(store: Valkey, **settings: object) -> Generator[Started]:
    """An API pod on that Valkey."""
    with _millstream("api", store, "port", **settings) as process:
        yield process


@contextlib.contextmanager
def worker(store: Valkey, **settings: object) -> Generator[Started]:
    """A worker with the fake engine on that Valkey, as fast as it goes."""
    with _millstream("worker", store, "metrics_port", engine="fake", **settings) as process:
        yield process


@contextlib.contextmanager
def _millstream(kind: str, store: Valkey, listens: str, **settings: object) -> Generator[Started]:
    port = free_port()
    environment = {
        "redis_url": store.url, listens: port, "model": "m",
        "max_queue": 20_000, "lease_s": 600, **settings,
    }  # fmt: skip
    named = {f"MILLSTREAM_{name.upper()}": str(value) for name, value in environment.items()}
    with started([sys.executable, "-m", "millstream", kind], port, **named) as process:
        yield process


async def child(module: str, *arguments: str) -> asyncio.subprocess.Process:
    """A process of ours that is spoken to by lines."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, cwd=ROOT,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
