"""A fake OpenAI server for gateways to stand in front of, as cheap as it can be.

    python -m benchmarks.support.fake_openai PORT

The content of a chat's first message is JSON: `{"rate": tokens a second}`, for ever; 0 is as fast
as the client takes them, null is never; or `{"tokens": so many}`, at once and no more. A token is a
text `~` and 16 digits, as `readers.py` has it.
"""

import asyncio
import json
import random
import sys
import time
from typing import Any

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{%b},"logprobs":null,"finish_reason":null}]}\n\n'
)
LAST = (CHUNK % b"").replace(b'"finish_reason":null', b'"finish_reason":"stop"') + (
    b"data: [DONE]\n\n"
)
INFORMATION = {
    b"/v1/models": {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]},
    b"/health": {},
}


class Connection(asyncio.Protocol):
    """One connection: a request at a time, a stream to the end of it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._rate: float | None = None
        self._paused = False
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._due = 0.0

    def connection_made(self, transport: Any) -> None:
        """Wait for a request."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Write no more."""
        if self._timer is not None:
            self._timer.cancel()

    def pause_writing(self) -> None:
        """The gateway has enough for now."""
        self._paused = True

    def resume_writing(self) -> None:
        """It wants more."""
        self._paused = False
        if self._rate == 0:
            self._flood()

    def data_received(self, data: bytes) -> None:
        """Answer what has come whole."""
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        size = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                size = int(line.partition(b":")[2])
        if len(body) < size:
            return
        self._buffer = body[size:]
        path = head.split(b" ", 2)[1].partition(b"?")[0]
        if path.endswith(b"/chat/completions"):
            self._stream(json.loads(body[:size]))
        else:
            text = json.dumps(INFORMATION.get(path, {})).encode()
            status = b"200 OK" if path in INFORMATION else b"404 Not Found"
            self._transport.write(
                b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (status, len(text), text)
            )

    def _stream(self, body: dict[str, Any]) -> None:
        content = body["messages"][0]["content"]
        text = content if isinstance(content, str) else content[0]["text"]
        asked = json.loads(text)
        self._rate = asked.get("rate")
        self._transport.write(HEAD)
        self._write(CHUNK % b'"role":"assistant","content":""')
        if "tokens" in asked:
            for _ in range(asked["tokens"]):
                self._stamp()
            self._write(LAST)
            self._transport.write(b"0\r\n\r\n")
            return
        if self._rate == 0:
            self._timer = self._loop.call_later(1.0, self._flood)  # when all streams are open
        elif self._rate is not None:
            self._due = self._loop.time() + random.random() / self._rate
            self._timer = self._loop.call_at(self._due, self._token)

    def _write(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _stamp(self) -> None:
        self._write(CHUNK % (b'"content":"~%016d"' % time.monotonic_ns()))

    def _token(self) -> None:
        self._stamp()
        self._due += 1 / self._rate
        self._timer = self._loop.call_at(self._due, self._token)

    def _flood(self) -> None:
        if self._paused or self._transport.is_closing():
            return
        self._stamp()
        self._timer = self._loop.call_soon(self._flood)


async def main() -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", int(sys.argv[1]), backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
