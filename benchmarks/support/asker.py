"""Clients that ask all at once and read each answer to its end, in a process that weighs little.

Run as `python -m benchmarks.support.asker`, it takes a JSON line a round: host, port, requests
(whole HTTP requests of chats that stream and tell their usage). It answers with one: `took_s`,
`first_s` (how long each waited for text), `tokens` (of all answers), and `cpu_s`, what reading them
took of this process. It ends with its standard input.
"""

import contextlib
import json
import re
import selectors
import socket
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.support.processes import child

LONGEST_S = 120.0  # without a byte of any answer; a bound on hangs
# An opening chunk has an empty one.
FIRST = re.compile(rb'"content":\s?"[^"]')
TOKENS = re.compile(rb'"completion_tokens":\s?(\d+)')
END = b"\r\n0\r\n\r\n"


@dataclass
class Round:
    """What one round brought."""

    took_s: float
    first_s: list[float]
    tokens: int
    cpu_s: float


class Asker:
    """The process as a benchmark speaks to it."""

    def __init__(self, process: Any) -> None:
        self._process = process

    async def ask(self, host: str, port: int, requests: Sequence[str]) -> Round:
        """One round.

        Raises:
            RuntimeError: an answer was no stream of text, which the process told on its stderr.
        """
        order = {"host": host, "port": port, "requests": list(requests)}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the asker has ended")
        return Round(**json.loads(line))


@asynccontextmanager
async def asker() -> AsyncGenerator[Asker]:
    """The process, ended with the context."""
    process = await child("benchmarks.support.asker")
    try:
        yield Asker(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class _Answer:
    """One connection."""

    def __init__(self, host: str, port: int) -> None:
        self.connection = socket.create_connection((host, port), timeout=LONGEST_S)
        self.first = 0.0
        self._text = b""
        self._pieces: list[bytes] = []

    def came(self) -> bool:
        """Read what there is; whether that was the end."""
        piece = self.connection.recv(65_536)
        self._pieces.append(piece)
        if not self.first:
            self._text += piece
            if FIRST.search(self._text):
                self.first = time.perf_counter()
        return not piece or b"".join(self._pieces[-2:]).endswith(END)

    def tokens(self) -> int:
        """How many it had, as it says itself."""
        whole = b"".join(self._pieces)
        told = TOKENS.findall(whole)
        if not self.first or not told:
            raise RuntimeError(f"no text: {whole[:300]!r}")
        return int(told[-1])


def ask(host: str, port: int, requests: Sequence[str]) -> Round:
    """Send all requests, read all answers.

    Raises:
        RuntimeError: one of them is no stream of text.
        TimeoutError: nothing came for too long.
    """
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        answers = [_Answer(host, port) for _ in requests]
        for answer in answers:
            stack.enter_context(answer.connection)
            selector.register(answer.connection, selectors.EVENT_READ, answer)
        began, busy = time.perf_counter(), time.process_time()
        for answer, request in zip(answers, requests, strict=True):
            answer.connection.sendall(request.encode())
        while selector.get_map():
            if not (ready := selector.select(LONGEST_S)):
                raise TimeoutError(f"no answer went on for {LONGEST_S:g} s")
            for key, _ in ready:
                if key.data.came():
                    selector.unregister(key.fileobj)
        took, busy = time.perf_counter() - began, time.process_time() - busy
        tokens = sum(answer.tokens() for answer in answers)
        return Round(took, [answer.first - began for answer in answers], tokens, busy)


def main() -> None:
    """A round a line."""
    for line in sys.stdin:
        print(json.dumps(asdict(ask(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
