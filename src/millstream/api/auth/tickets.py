"""Tickets: what a browser's EventSource and WebSocket, which cannot send headers, show instead.

A ticket is for one task, opens one stream on any pod, and lasts a minute. In Redis lies its hash.
"""

import secrets

import msgspec

from millstream.api.auth.caller import Caller, CallerLimits
from millstream.api.relay import missing_task, unavailable
from millstream.shared.connection import RedisError
from millstream.shared.errors import NotAuthenticated
from millstream.shared.keys import Keys
from millstream.shared.schemas import shard_of
from millstream.shared.script_runner import ScriptRunner

TICKET_S = 60
LONGEST_TICKET = 100


class _Grant(msgspec.Struct, frozen=True):
    """What a ticket stands for."""

    caller: str
    limits: CallerLimits


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Grant).decode


class Tickets:
    """Gives tickets out and takes them back, once each."""

    def __init__(self, runner: ScriptRunner) -> None:
        self._runner = runner

    async def issue(self, task_id: str, caller: Caller) -> str:
        """A new ticket for a task of this caller.

        Raises:
            UnknownTask: there is none, or it is another caller's.
            ExpiredTask: there was one.
            RedisUnavailable: Redis did not answer.
        """
        shard = shard_of(task_id)
        answer = "unknown"
        ticket = secrets.token_urlsafe(32)
        if shard is not None:
            keys = Keys(shard)
            grant = _encode(_Grant(caller.id, caller.limits))
            try:
                raw = await self._runner.run(
                    "ticket",
                    [keys.task(task_id), keys.ticket(task_id, ticket)],
                    [task_id, caller.id, grant, TICKET_S],
                )
            except RedisError as error:
                raise unavailable(error) from error
            answer = raw.decode()
        if answer != "ok":
            raise missing_task(task_id, expired=answer == "expired")
        return ticket

    async def redeem(self, task_id: str, ticket: str) -> Caller:
        """The caller a ticket was given to; it may read this task, and is used up.

        Raises:
            NotAuthenticated: there is no such ticket for this task, or none any more.
            RedisUnavailable: Redis did not answer.
        """
        shard = shard_of(task_id)
        found: bytes | None = None
        if shard is not None and len(ticket) <= LONGEST_TICKET:
            key = Keys(shard).ticket(task_id, ticket)
            try:
                found = await self._runner.bounded(self._runner.client.getdel(key))
            except RedisError as error:
                raise unavailable(error) from error
        if found is None:
            raise NotAuthenticated(
                "This ticket was used, has expired, or is for another task: ask for a new one by "
                "POST /tasks/{task_id}/ticket.",
                code="invalid_ticket",
            )
        grant = _decode(found)
        return Caller(grant.caller, models=frozenset(), limits=grant.limits)
