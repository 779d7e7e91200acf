"""The choices of one answer, each a task: what they bring, read together as it comes."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from millstream.shared.cancellation import cancel_until_done
from millstream.shared.events import Event

Turn = list[tuple[int, list[Event]]]
"""New events by choice, none of them empty; no choice at all when it is time for a keepalive."""


class Told(msgspec.Struct, frozen=True):
    """One choice that was completed: its token events and its end."""

    tokens: list[Event]
    end: Event

    @property
    def text(self) -> str:
        """All its text."""
        return "".join(event.text for event in self.tokens)


def turns_of(choices: Sequence[AsyncGenerator[list[Event]]]) -> AsyncGenerator[Turn]:
    """The events of all choices, each in order and each choice up to its terminal one.

    Args:
        choices: As `Relay.events` gives them; an error of one of them ends all.
    """
    return _alone(choices[0]) if len(choices) == 1 else _merged(choices)


async def _alone(events: AsyncGenerator[list[Event]]) -> AsyncGenerator[Turn]:
    async with aclosing(events):
        async for batch in events:
            yield [(0, batch)] if batch else []


async def _merged(choices: Sequence[AsyncGenerator[list[Event]]]) -> AsyncGenerator[Turn]:
    """One step of each choice at a time is under way, so memory stays that of the readers."""
    under_way = {asyncio.create_task(_next(events)): at for at, events in enumerate(choices)}
    try:
        while under_way:
            done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            turn: Turn = []
            for task in sorted(done, key=under_way.__getitem__):
                choice = under_way.pop(task)
                try:
                    batch = task.result()
                except StopAsyncIteration:
                    continue
                if batch:
                    turn.append((choice, batch))
                under_way[asyncio.create_task(_next(choices[choice]))] = choice
            yield turn
    finally:
        await cancel_until_done(under_way)
        await asyncio.gather(*under_way, return_exceptions=True)
        for events in choices:
            await events.aclose()


async def _next(events: AsyncGenerator[list[Event]]) -> list[Event]:
    return await anext(events)
