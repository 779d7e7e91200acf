"""Spans as OpenTelemetry's SDK makes them, sent by OTLP from a thread of its own."""

import logging
import os
import time
from collections.abc import Mapping
from typing import Literal

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_SCHEDULE_DELAY
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from millstream import __version__

logger = logging.getLogger(__name__)

# The library waits 5 s by default; what a killed process had not sent is lost.
SEND_EVERY_MS = 1000
SILENT_S = 10.0
Attribute = str | int | float | tuple[str, ...]

_context = TraceContextTextMapPropagator()


class Tracing:
    """Makes the spans of one process. Nothing here waits: a queue that is full drops spans.

    All else (endpoint, headers, sampling, sizes, `OTEL_SERVICE_NAME`) the library reads from the
    standard variables.

    Args:
        role: `api` or `worker`: part of the service's name, unless that is set.
        instance: The id of the process in the fleet.

    Raises:
        ValueError: a variable has a value that the library does not take.
    """

    def __init__(self, role: str, instance: str) -> None:
        _tell_seldom()
        resource = Resource.create(
            {"service.version": __version__, "service.instance.id": instance}
        )
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: f"millstream-{role}"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        delay = None if os.environ.get(OTEL_BSP_SCHEDULE_DELAY) else SEND_EVERY_MS
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=delay)
        )
        self._tracer = self._provider.get_tracer("millstream", __version__)

    def begin(
        self,
        name: str,
        kind: Literal["server", "consumer", "internal"],
        *,
        parent: Span | Mapping[str, str],
        attributes: Mapping[str, Attribute],
        start_ns: int | None = None,
    ) -> Span:
        """Open a span, which has to be ended.

        Args:
            name: Its name, one of few.
            kind: Its part in the trace.
            parent: The span it belongs to, here or, by the headers `traceparent` and `tracestate`,
                elsewhere. Without any, or with one that is malformed, a new trace begins.
            attributes: What is known at its beginning.
            start_ns: When it began, in Unix time; None is now.
        """
        if isinstance(parent, Span):
            context = set_span_in_context(parent)
        else:
            context = _context.extract(parent)
        return self._tracer.start_span(
            name, context, SpanKind[kind.upper()], attributes, start_time=start_ns
        )

    @staticmethod
    def traceparent(span: Span) -> str:
        """The header by which others continue a span."""
        carrier: dict[str, str] = {}
        _context.inject(carrier, set_span_in_context(span))
        return carrier.get("traceparent", "")

    @staticmethod
    def fail(span: Span, error: str) -> None:
        """Say that what a span stands for failed; `error` is one of few words."""
        span.set_attribute("error.type", error)
        span.set_status(Status(StatusCode.ERROR))

    def close(self) -> None:
        """Send what is left; blocks for as long as the collector lets it."""
        self._provider.shutdown()


class _Seldom(logging.Handler):
    """What the library has to say of its trouble, a line in ten seconds, without tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + SILENT_S
            logger.warning("traces: %s", record.getMessage())


def _tell_seldom() -> None:
    library = logging.getLogger("opentelemetry")
    library.propagate = False
    library.handlers = [_Seldom()]
