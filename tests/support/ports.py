"""Ports for servers that tests start."""

import fcntl
import secrets
import socket
import tempfile
from pathlib import Path
from typing import IO

# Below what Linux gives outgoing connections, any of which could take the port before its server.
_PORTS = range(20_000, 32_000)
_held: list[IO[str]] = []


def free_port() -> int:
    """A port that is free, and that no other test run on this machine gets while this one lives."""
    folder = Path(tempfile.gettempdir()) / "millstream-test-ports"
    folder.mkdir(mode=0o777, exist_ok=True)
    while True:
        port = secrets.choice(_PORTS)
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        _held.append(lock)
        return port
