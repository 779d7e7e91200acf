"""A caller's open streams: the slot that a route takes before it opens one."""

import secrets
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
    """One stream of a caller, which counts from `take` to the end of the answer.

    Args:
        connection: What is to be answered. A WebSocket's end is its route's to tell: `give_back`.
        pod: Which counts.
        caller: Whose stream it is.
    """

    def __init__(self, connection: HTTPConnection, pod: Pod, caller: Caller) -> None:
        self._connection = connection
        self._pod = pod
        self._caller = caller
        self._id = secrets.token_hex(8)
        self._taken = False

    async def take(self) -> None:
        """Count a stream as open; to be asked before anything is made for it.

        Raises:
            RateLimited: the caller has as many open as it may.
            RedisUnavailable: Redis does not answer.
        """
        most = self._pod.limiter.limits_of(self._caller).concurrent_streams
        if not most or self._taken:
            return
        # Before the answer: it may be lost, and the stream count nevertheless.
        self._taken = True
        wire: Wire | None = self._connection.scope.get("extensions", {}).get(WIRE)
        if wire is not None:  # a stream goes on when its request is over
            wire.when_over(self.give_back)
        try:
            if await self._pod.stream_slots.take(self._caller.id, self._id, most=most):
                return
        except RedisError as error:
            raise unavailable(error) from error
        self._taken = False
        raise RateLimited(f"Rate limit reached: {most} streams are open, as many as may.")

    def give_back(self) -> None:
        """The answer has ended; Redis is told without anyone waiting for it."""
        if self._taken:
            self._taken = False
            work = self._pod.stream_slots.give_back(self._caller.id, self._id)
            self._pod.spawn(work, "give a stream back")


# Asynchronous, though they wait for nothing: FastAPI sends a plain function to a thread.
async def slot_of(connection: HTTPConnection, pod: CurrentPod, caller: CurrentCaller) -> Slot:
    """A slot for the request's stream (a FastAPI dependency)."""
    return Slot(connection, pod, caller)


async def reader_slot_of(connection: HTTPConnection, pod: CurrentPod, caller: TaskReader) -> Slot:
    """The same for a stream that a ticket may open: it counts as its caller's too."""
    return Slot(connection, pod, caller)


StreamSlot = Annotated[Slot, Depends(slot_of)]
ReaderSlot = Annotated[Slot, Depends(reader_slot_of)]
