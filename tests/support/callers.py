"""Callers of a fleet that is being replaced: they lose nothing, and try nothing twice."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from tests.support import sse
from tests.support.faults import undisturbed

from millstream.api.streams import RETRY_MS

MOST_RECONNECTS = 3


class Caller:
    """Takes the addresses in turn, and passes over one that refuses the connection, none else."""

    def __init__(self, http: httpx.AsyncClient, urls: Sequence[str], turn: int = 0) -> None:
        self._http = http
        self._urls = urls
        self._turn = turn
        self.reconnects = 0
        self.gaps_s: list[float] = []
        """Times between one event of a task and the next, however the stream was cut."""

    async def _send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        for _ in self._urls:
            self._turn += 1
            url = self._urls[self._turn % len(self._urls)]
            request = self._http.build_request(method, f"{url}{path}", **arguments)
            try:
                return await self._http.send(request, stream=True)
            except httpx.ConnectError:
                continue
        raise AssertionError("every address refuses")

    async def streams_a_task(self, text: str) -> list[sse.Frame]:
        """Submit it and read it to its end, coming back wherever a stream was ended."""
        answer = await self._send("POST", "/tasks", json={"prompt": text})
        await answer.aread()
        assert answer.status_code == 202, answer.text
        path = answer.json()["stream_url"]
        frames: list[sse.Frame] = []
        last = time.monotonic()
        for attempt in range(MOST_RECONNECTS + 1):
            self.reconnects += attempt > 0
            answer = await self._send("GET", path, headers={"Last-Event-ID": str(len(frames))})
            assert answer.status_code == 200
            async for frame in sse.frames(answer.aiter_lines()):
                if frame.event != "queued":
                    frames.append(frame)
                    self.gaps_s.append(time.monotonic() - last)
                    last = time.monotonic()
            await answer.aclose()
            if frames and frames[-1].event != "token":
                break
            await asyncio.sleep(RETRY_MS / 1000)  # as the stream's last line asks
        sse.check_native(frames)
        assert frames[-1].event == "completed"
        return frames

    async def streams_a_chat(self, text: str) -> str:
        """A stream that nobody could resume."""
        answer = await self._send("POST", "/v1/chat/completions", json=self._chat(text, True))
        whole = (await answer.aread()).decode()
        assert answer.status_code == 200, whole
        return sse.chat_text(sse.parse(whole))

    async def asks_for_all_of_it(self, text: str) -> str:
        """An answer in one piece."""
        answer = await self._send("POST", "/v1/chat/completions", json=self._chat(text, False))
        await answer.aread()
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    @staticmethod
    def _chat(text: str, stream: bool) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}], "stream": stream}

    async def asks(self, number: int, text: str, *, tokens: int) -> None:
        """One of the three, by its number; its text is the undisturbed one."""
        kind = number % 3
        if kind == 0:
            answer = sse.native_text(await self.streams_a_task(text))
        else:
            answer = await (
                self.streams_a_chat(text) if kind == 1 else self.asks_for_all_of_it(text)
            )
        assert answer == undisturbed(text, tokens=tokens, chat=kind > 0)


@asynccontextmanager
async def load(
    ask: Callable[[int], Coroutine[Any, Any, None]], *, rate: float
) -> AsyncIterator[list[int]]:
    """Ask so often a second, by the numbers 0, 1, 2 …; at the end all have been answered.

    Gives the list of those that were asked, which grows.
    """
    stop = asyncio.Event()
    asked: list[int] = []

    async def begin(tasks: asyncio.TaskGroup) -> None:
        while not stop.is_set():
            tasks.create_task(ask(len(asked)))
            asked.append(len(asked))
            try:
                await asyncio.wait_for(stop.wait(), 1 / rate)
            except TimeoutError:
                continue

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(begin(tasks))
        try:
            yield asked
        finally:
            stop.set()
