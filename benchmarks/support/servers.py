"""Servers that run the bundled model themselves, for comparison; nothing outlives their process.

`transformers serve` and the tutorials' app (`benchmarks.support.tutorials`) run from this virtual
environment. They need the worker's packages, FastAPI, uvicorn and the openai client: `make test`
installs them all.
"""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.support.processes import ROOT, Started, started
from tests.support.ports import free_port

UP_S = 120.0


@dataclass(frozen=True)
class Server:
    """A server of OpenAI's chats.

    Args:
        name: Who it is.
        most_streams: With more at once it takes minutes.
        command: What starts it with a model's folder, in a dtype, on a port.
    """

    name: str
    most_streams: int
    command: Callable[[Path, str, int], Sequence[str]]


def _serve(folder: Path, dtype: str, port: int) -> Sequence[str]:
    # Left alone it takes most of the machine's memory for its cache, and a mask of 8,192 tokens.
    return [
        str(Path(sys.executable).with_name("transformers")), "serve", str(folder), "--port",
        str(port), "--host", "127.0.0.1", "--device", "cpu", "--dtype", dtype,
        "--continuous-batching", "--cb-num-blocks", "80", "--cb-max-batch-tokens", "512",
    ]  # fmt: skip


def _tutorial(*how: str) -> Callable[[Path, str, int], Sequence[str]]:
    def command(folder: Path, dtype: str, port: int) -> Sequence[str]:
        module = "benchmarks.support.tutorials"
        return [sys.executable, "-m", module, str(folder), dtype, str(port), *how]

    return command


SERVERS = (
    Server(f"transformers serve {version('transformers')}", 64, _serve),
    Server("a thread a request", 4, _tutorial()),
    Server("a lock", 4, _tutorial("lock")),
)


@contextmanager
def serving(server: Server, folder: Path, dtype: str) -> Generator[Started]:
    """The server, ready for requests.

    Raises:
        TimeoutError: it does not start in its time.
    """
    port = free_port()
    command = server.command(folder, dtype, port)
    with started(command, port, cwd=ROOT, up_s=UP_S, HF_HUB_OFFLINE="1") as process:
        yield process
