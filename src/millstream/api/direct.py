"""The way past FastAPI for the routes that make tasks: they read their requests themselves.

FastAPI's middlewares, routers and dependencies take as long as a pod takes for all else before a
task is made. It still lists these routes, and serves whatever is not exactly one of them.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from millstream.api.routes.asked import Asked, AskedHere, asked_of
from millstream.shared.errors import MillstreamError

Endpoint = Callable[[Asked], Awaitable[Response]]


class Direct:
    """Around an application: calls the endpoints that ask for an `Asked` and nothing else.

    Errors are answered by the application's own handlers.

    Args:
        app: Whose error handlers are installed.
        routers: Where to look for such endpoints; each answers by a `Response`.
    """

    def __init__(self, app: FastAPI, routers: Iterable[APIRouter]) -> None:
        self._app = app
        self._handlers: list[tuple[type[Exception], Any]] = [
            (kind, app.exception_handlers[kind])
            for kind in (MillstreamError, HTTPException, Exception)
        ]
        self._routes: dict[tuple[str, str], tuple[APIRoute, Endpoint]] = {
            (method, route.path): (route, route.endpoint)
            for router in routers
            for route in router.routes
            if isinstance(route, APIRoute) and _asks_only(route.endpoint)
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve as the application does."""
        found = None
        if scope["type"] == "http":
            found = self._routes.get((scope["method"], scope["path"]))
        if found is None:
            await self._app(scope, receive, send)
            return
        scope["app"] = self._app
        scope["route"], endpoint = found
        request = Request(scope, receive, send)
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            response = await endpoint(await asked_of(request))
            await response(scope, receive, noted)
        except Exception as error:
            if begun:  # there can be no other answer; the server cuts it
                raise
            kind, handle = next(each for each in self._handlers if isinstance(error, each[0]))
            response = await handle(request, error)
            await response(scope, receive, send)
            if kind is Exception:
                raise  # for the server to log, as Starlette has it


def _asks_only(endpoint: Callable[..., Any]) -> bool:
    asked = inspect.signature(endpoint).parameters.values()
    return [parameter.annotation for parameter in asked] == [AskedHere]
