"""The span of a request that makes tasks: until its answer is whole or, as a stream, has begun."""

import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, State
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.shared.schemas import TaskRequest
from millstream.shared.tracing import request_attributes

if TYPE_CHECKING:  # an extra
    from opentelemetry.trace import Span

    from millstream.shared.otlp import Tracing

_current: ContextVar["RequestTrace | None"] = ContextVar("trace", default=None)


def current_trace() -> "RequestTrace | None":
    """The trace of the request that is being answered; None: there is none."""
    return _current.get()


class RequestTrace:
    """A request, which gets a span once it is known to make tasks."""

    def __init__(self, tracing: "Tracing", scope: Scope) -> None:
        self._tracing = tracing
        self._scope = scope
        self._began_ns = time.time_ns()
        self._span: Span | None = None
        self.status: int | None = None
        """The status of its answer, once that has begun."""

    def submitting(self) -> str:
        """It is about to make tasks; the `traceparent` that they are to carry."""
        scope, headers = self._scope, Headers(scope=self._scope)
        method: str = scope.get("method", "GET")  # a WebSocket has none
        route: str = getattr(scope.get("route"), "path", "")
        # Several are malformed as one is.
        parents = headers.getlist("traceparent")
        parent = {"traceparent": parents[0]} if len(parents) == 1 else {}
        self._span = self._tracing.begin(
            f"{method} {route}",
            "server",
            parent=parent | {"tracestate": ",".join(headers.getlist("tracestate"))},
            attributes={
                "http.request.method": method,
                "http.route": route,
                "url.scheme": scope.get("scheme", "http"),
                "url.path": scope["path"],  # without its query, in which a prompt may stand
            },
            start_ns=self._began_ns,
        )
        return self._tracing.traceparent(self._span)

    def accepted(self, requests: Sequence[TaskRequest], task_ids: Sequence[str]) -> None:
        """The tasks are made."""
        assert self._span is not None  # noqa: S101 - `submitting` was called
        self._span.set_attributes(request_attributes(requests[0]))
        self._span.set_attribute("gen_ai.request.choice.count", len(requests))
        self._span.set_attribute("millstream.task.ids", tuple(task_ids))

    def end(self) -> None:
        """The request is answered; a stream goes on without us (ADR 26)."""
        if self._span is None:
            return
        if self.status is not None:
            self._span.set_attribute("http.response.status_code", self.status)
            if self.status >= 500:
                self._tracing.fail(self._span, str(self.status))
        self._span.end()


class Traced:
    """An ASGI middleware, used only where traces are wanted.

    Args:
        app: What it wraps.
        state: Of the application; its `tracing` makes the spans, or is None.
    """

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve as the application does."""
        if scope["type"] == "lifespan" or self._state.tracing is None:
            await self._app(scope, receive, send)
            return
        trace = RequestTrace(self._state.tracing, scope)

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
            await send(message)

        token = _current.set(trace)
        try:
            await self._app(scope, receive, watched)
        finally:
            _current.reset(token)
            trace.end()
