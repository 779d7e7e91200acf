"""The crowd: so many clients that ask one thing after the other until told to stop."""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any

import httpx2

from millstream.fleet.chaos.client import Client
from millstream.fleet.chaos.history import Form, History
from millstream.fleet.chaos.prompts import make_poison, make_prompt

CLIENTS = 40

# A fifth in one piece or by polling, as many with a key, native and OpenAI's routes alike.
_FORMS = (
    *(Form.NATIVE,) * 3,
    *(Form.CHAT_STREAM,) * 3,
    *(Form.RESPONSE,) * 2,
    Form.CHAT_WHOLE,
    Form.POLL,
)
_KEYED = 0.2


class Load:
    """Clients, what they saw, and what they are at."""

    def __init__(
        self, urls: Sequence[str], http: httpx2.AsyncClient, *, seed: int, clients: int = CLIENTS
    ) -> None:
        self._urls = urls
        self._http = http
        self._seed = seed
        self._count = clients
        self._stopping = asyncio.Event()
        self._given_up = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._poisoner = random.Random(f"{seed} poison")  # noqa: S311
        self._hands = self._client("hands")
        self.histories: list[History] = []
        self.active: list[History] = []

    @property
    def tokens(self) -> int:
        """Token events that streams have brought so far."""
        return sum(len(item.seen) for history in self.histories for item in history.connections)

    def start(self) -> None:
        """Let the crowd in."""
        for number in range(self._count):
            self._spawn(self._ask_on(number))

    def poison(self) -> None:
        """One more client, whose task ends its workers."""
        history = History(Form.NATIVE, make_poison(self._poisoner))
        self._spawn(self._ask(self._client(f"poison {len(self.histories)}"), history))

    def stop_task(self, history: History) -> None:
        """Stop somebody's task from elsewhere."""
        history.stop_sent = True
        self._spawn(self._hands.stop(history))

    async def finish(self, within_s: float) -> int:
        """Let everybody finish what they are at; how many could not."""
        self._stopping.set()
        _, left = await asyncio.wait(self._tasks, timeout=within_s) if self._tasks else ((), ())
        return len(left)

    async def close(self) -> None:
        """Send everybody home, now."""
        self._stopping.set()
        self._given_up.set()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=1)

    def _client(self, name: str) -> Client:
        generator = random.Random(f"{self._seed} {name}")  # noqa: S311
        return Client(self._urls, self._http, generator, stopping=self._given_up)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask_on(self, number: int) -> None:
        generator = random.Random(f"{self._seed} client {number}")  # noqa: S311
        client = self._client(f"choices {number}")
        asked = 0
        # Not all at once, or all would begin and end together for the whole run.
        await asyncio.sleep(generator.uniform(0, 2))
        while not self._stopping.is_set():
            asked += 1
            key = f"{self._seed}-{number}-{asked}" if generator.random() < _KEYED else None
            form = generator.choice(_FORMS)
            await self._ask(client, History(form, make_prompt(generator), key))

    async def _ask(self, client: Client, history: History) -> None:
        self.histories.append(history)
        self.active.append(history)
        try:
            await client.run(history)
        finally:
            self.active.remove(history)
