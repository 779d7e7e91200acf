"""The clients of a relay, in a process of their own: raw sockets, so that they weigh little.

Run as `python -m benchmarks.support.readers`, it takes one JSON line: port, requests (whole HTTP
requests, each of which opens a stream), step. It answers by lines: `open` when every stream has had
its first bytes, `step` whenever so many more tokens have come, and after a line `report` what came
since the last one, as JSON. A token is a text `~` and 16 digits: the monotonic clock when it was
written, in nanoseconds. It ends with its standard input.
"""

import asyncio
import json
import re
import sys
import time
from typing import Any

import uvloop

STAMP = re.compile(rb"~(\d{16})")
AT_ONCE = 25  # connections that are being made


class Crowd:
    """All streams together."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.total = 0
        self.told = 0
        self.latencies: list[int] = []

    def came(self, data: bytes) -> None:
        """Count a piece of some stream."""
        self.total += data.count(b"~")
        if not self.step:
            now = time.monotonic_ns()
            self.latencies += [now - int(stamp) for stamp in STAMP.findall(data)]
            return
        while self.total - self.told >= self.step:
            self.told += self.step
            print("step", flush=True)

    def report(self) -> str:
        """What came since the last report; latencies in ms."""
        ordered = sorted(self.latencies) or [0]
        figures = {
            "tokens": self.total,
            "p50_ms": ordered[len(ordered) // 2] / 1e6,
            "p99_ms": ordered[len(ordered) * 99 // 100] / 1e6,
        }
        self.total = self.told = 0
        self.latencies = []
        return json.dumps(figures)


class Stream(asyncio.Protocol):
    """One connection."""

    def __init__(self, crowd: Crowd, request: bytes, opened: asyncio.Future[bool]) -> None:
        self._crowd = crowd
        self._request = request
        self.opened = opened

    def connection_made(self, transport: Any) -> None:
        """Ask."""
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count."""
        if not self.opened.done():
            if not data.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503")):
                print(f"refused: {data[:300]!r}", flush=True)
                return
            self.opened.set_result(data.startswith(b"HTTP/1.1 200"))
        self._crowd.came(data)


async def main() -> None:
    """Open the streams, then answer."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=2**26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    order = json.loads(await lines.readline())
    crowd, gate = Crowd(order["step"]), asyncio.Semaphore(AT_ONCE)

    async def open_one(request: str) -> None:
        def stream() -> Stream:
            return Stream(crowd, request.encode(), loop.create_future())

        async with gate:
            while True:
                connection, opening = await loop.create_connection(
                    stream, "127.0.0.1", order["port"]
                )
                if await opening.opened:
                    return
                connection.close()  # too much for a machine that does other things besides
                await asyncio.sleep(1)

    await asyncio.gather(*map(open_one, order["requests"]))
    print("open", flush=True)
    while (await lines.readline()) == b"report\n":
        print(crowd.report(), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
