"""What routes ask for to know whose request it is: each says by its parameter who may come in."""

from collections.abc import Mapping
from typing import Annotated

from fastapi import Depends, Query
from starlette.requests import HTTPConnection

from millstream.api.auth.caller import Caller
from millstream.api.pod import CurrentPod
from millstream.shared.errors import NotAllowed


async def caller_of(connection: HTTPConnection, pod: CurrentPod) -> Caller:
    """Whose request or WebSocket it is."""
    query: Mapping[str, str] = {}
    if connection.scope["query_string"]:  # few have one
        query = connection.query_params
    return await pod.authenticator.caller(connection.headers, query)


async def reader_of(
    connection: HTTPConnection,
    pod: CurrentPod,
    task_id: str,
    ticket: Annotated[str | None, Query()] = None,
) -> Caller:
    """Whose task is to be read: by a ticket for it, or by a key as everywhere."""
    if ticket is None:
        return await caller_of(connection, pod)
    return await pod.tickets.redeem(task_id, ticket)


async def admin_of(caller: "CurrentCaller") -> Caller:
    """A caller who may see the fleet, and lay hands on it."""
    if not caller.admin:
        raise NotAllowed("Only a key of `millstream keys add NAME --admin` may do this.")
    return caller


CurrentCaller = Annotated[Caller, Depends(caller_of)]
TaskReader = Annotated[Caller, Depends(reader_of)]
Administrator = Annotated[Caller, Depends(admin_of)]
