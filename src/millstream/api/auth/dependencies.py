"""What routes ask for to know whose request it is."""

from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from millstream.api.auth.caller import ANONYMOUS, Caller


async def caller_of(connection: HTTPConnection) -> Caller:
    """Whose request or WebSocket it is; everyone's, while there are no keys."""
    return ANONYMOUS


CurrentCaller = Annotated[Caller, Depends(caller_of)]
