"""The only table from errors to HTTP: status codes and OpenAI's error body."""

import json
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.routing import Match, Route
from starlette.websockets import WebSocketDisconnect, WebSocketState

from millstream.api.rate_headers import rate_headers
from millstream.api.request_counts import RequestCounts
from millstream.shared import errors
from millstream.shared.events import Event
from millstream.shared.schemas import to_json
from millstream.shared.states import TaskState

logger = logging.getLogger(__name__)

_STATUS: tuple[tuple[type[errors.MillstreamError], int], ...] = (
    (errors.NotAuthenticated, 401),
    (errors.NotAllowed, 403),
    (errors.UnknownModel, 404),
    (errors.UnknownTask, 404),
    (errors.ExpiredTask, 410),
    (errors.UnknownWorker, 404),
    (errors.LogRewound, 410),
    (errors.LogIncomplete, 410),
    (errors.IdempotencyConflict, 409),
    (errors.RequestTooLarge, 413),
    (errors.InvalidRequest, 400),
    (errors.RateLimited, 429),
    (errors.FleetUnavailable, 503),
    (errors.MillstreamError, 500),
)
_WORDS = {404: "not_found", 405: "method_not_allowed"}


def status_of(error: errors.MillstreamError) -> int:
    """The HTTP status that an error is answered with."""
    return next(status for kind, status in _STATUS if isinstance(error, kind))


def error_object(
    message: str, *, status: int, code: str | None, param: str | None = None
) -> dict[str, Any]:
    """OpenAI's error body."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: errors.MillstreamError) -> JSONResponse:
    """The whole answer to an error, `Retry-After` included."""
    status = status_of(error)
    param = error.param if isinstance(error, errors.InvalidRequest) else None
    headers: dict[str, str] = {}
    if isinstance(error, errors.FleetUnavailable | errors.RateLimited):
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, errors.NotAuthenticated):  # RFC 6750: no error word where there was no key
        headers["WWW-Authenticate"] = 'Bearer error="invalid_token"' if error.given else "Bearer"
    body = error_object(error.message, status=status, code=error.code, param=param)
    if isinstance(error, errors.RateLimited):
        body["error"]["type"] = error.limit  # as OpenAI has it
        if error.standing is not None:
            headers |= rate_headers(error.standing)
    return JSONResponse(body, status, headers)


async def refuse_socket(websocket: WebSocket, error: errors.MillstreamError) -> None:
    """Tell a WebSocket of an error, by a frame that says all and a code for who reads no frames.

    The code is 4000 and the HTTP status; 1013 where it is worth another try, 1011 for our faults.
    """
    body = json.loads(bytes(error_response(error).body))
    code = 1011
    if isinstance(error, errors.FleetUnavailable | errors.RateLimited):
        code = 1013
        body["retry_after_s"] = error.retry_after_s
    elif (status := status_of(error)) < 500:
        code = 4000 + status
    try:
        if websocket.application_state == WebSocketState.CONNECTING:
            await websocket.accept()
        await websocket.send_text(to_json({"event": "error", "data": body}).decode())
        await websocket.close(code, error.code)
    except (WebSocketDisconnect, RuntimeError):
        logger.debug("a WebSocket went before it heard of %s", error.code)


def failed_task(error: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and body for a task that ended in `failed` before anything was answered."""
    status = 400 if error.get("type") == "invalid_request_error" else 500
    return status, {"error": error}


def unfinished(event: Event) -> dict[str, Any]:
    """The error object for a task that was stopped or failed."""
    if event.kind == TaskState.CANCELLED:
        return error_object("The task was stopped.", status=499, code="cancelled")
    return event.body


def install_error_handlers(
    app: FastAPI, counts: RequestCounts, routers: Sequence[APIRouter]
) -> None:
    """Make every error that leaves a route an OpenAI error body, and count it.

    Args:
        app: Where they are installed.
        counts: Where they are counted.
        routers: What the application serves.
    """

    async def on_millstream_error(connection: HTTPConnection, error: Exception) -> Any:
        assert isinstance(error, errors.MillstreamError)  # noqa: S101 - the table below says so
        counts.refuse(error, status_of(error))
        if isinstance(connection, WebSocket):
            return await refuse_socket(connection, error)
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)  # noqa: S101 - the table below says so
        message = str(error.detail)
        if error.status_code in _WORDS:
            message = f"{message}: {request.method} {request.url.path}"
        body = error_object(
            message, status=error.status_code, code=_WORDS.get(error.status_code, "http_error")
        )
        headers = dict(error.headers or {})
        if error.status_code == 405 and (methods := _methods_at(request, routers)):
            headers["Allow"] = ", ".join(methods)
        return JSONResponse(body, error.status_code, headers)

    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        logger.error("bug in %s %s", request.method, request.url.path, exc_info=error)
        body = error_object(
            "The server failed at this request; it has been logged.",
            status=500,
            code="internal_error",
        )
        return JSONResponse(body, 500, {"Connection": "close"})  # the server closes it

    app.add_exception_handler(errors.MillstreamError, on_millstream_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)


def _methods_at(request: Request, routers: Sequence[APIRouter]) -> list[str]:
    """What a path may be asked by (RFC 9110, 15.5.6); Starlette tells of its first route alone."""
    methods: set[str] = set()
    for router in routers:
        for route in router.routes:
            if isinstance(route, Route) and route.matches(request.scope)[0] != Match.NONE:
                methods |= route.methods or set()
    return sorted(methods)
