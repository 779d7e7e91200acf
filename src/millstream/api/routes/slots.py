"""What a route asks for whose answer may be a stream: a slot, given back when that has ended."""

import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from millstream.api.auth.caller import Caller
from millstream.api.auth.dependencies import CurrentCaller, TaskReader
from millstream.api.pod import CurrentPod, Pod
from millstream.api.relay import unavailable
from millstream.api.wire import WIRE, Wire
from millstream.shared.connection import RedisError
from millstream.shared.errors import RateLimited


class Slot:
    """One stream of a caller, which counts from `take` to the end of the request."""

    def __init__(self, pod: Pod, caller: Caller) -> None:
        self._pod = pod
        self._caller = caller
        self._id = secrets.token_hex(8)
        self.taken = False
        """Whether it counts."""

    async def take(self) -> None:
        """Count a stream as open; to be asked before anything is made for it.

        Raises:
            RateLimited: the caller has as many open as it may.
            RedisUnavailable: Redis does not answer.
        """
        most = self._pod.limiter.limits_of(self._caller).concurrent_streams
        if not most or self.taken:
            return
        # Before the answer: it may be lost, and the stream count nevertheless.
        self.taken = True
        try:
            if await self._pod.stream_slots.take(self._caller.id, self._id, most=most):
                return
        except RedisError as error:
            raise unavailable(error) from error
        self.taken = False
        raise RateLimited(f"Rate limit reached: {most} streams are open, as many as may.")

    def give_back(self) -> None:
        """The answer has ended; Redis is told without anyone waiting for it."""
        if self.taken:
            work = self._pod.stream_slots.give_back(self._caller.id, self._id)
            self._pod.spawn(work, "give a stream back")


@asynccontextmanager
async def _slot(connection: HTTPConnection, pod: Pod, caller: Caller) -> AsyncGenerator[Slot]:
    slot = Slot(pod, caller)
    try:
        yield slot
    finally:
        wire: Wire | None = connection.scope.get("extensions", {}).get(WIRE)
        if slot.taken and wire is not None:  # a stream goes on when its request is over
            wire.when_over(slot.give_back)
        else:
            slot.give_back()


async def slot_of(
    connection: HTTPConnection, pod: CurrentPod, caller: CurrentCaller
) -> AsyncGenerator[Slot]:
    """A slot for the request's stream (a FastAPI dependency); its end is the answer's."""
    async with _slot(connection, pod, caller) as slot:
        yield slot


async def reader_slot_of(
    connection: HTTPConnection, pod: CurrentPod, caller: TaskReader
) -> AsyncGenerator[Slot]:
    """The same for a stream that a ticket may open: it counts as its caller's too."""
    async with _slot(connection, pod, caller) as slot:
        yield slot


StreamSlot = Annotated[Slot, Depends(slot_of)]
ReaderSlot = Annotated[Slot, Depends(reader_slot_of)]
