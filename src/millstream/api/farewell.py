"""Last words for requests that the server cancels, since it goes before they are done."""

import asyncio

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.api.errors import error_object
from millstream.api.http import CUT
from millstream.api.request_counts import RequestCounts


class Farewell:
    """Around an application: a cancelled request is answered as every other that cannot be served.

    Each answer is counted as it begins.

    uvicorn would answer with a plain 500 and log a traceback for each. What has begun is cut by a
    reset, so that nobody takes it for the whole.
    """

    def __init__(self, app: ASGIApp, counts: RequestCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve as the application does."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            if not begun:  # the first one is the head
                begun = True
                self._counts.answer(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if begun:
                scope["extensions"][CUT]["now"]()
                await receive()  # until it has gone
                return
            error = error_object("This server is going away.", status=503, code="server_closing")
            await JSONResponse(error, 503, {"Retry-After": "1"})(scope, receive, watched)
