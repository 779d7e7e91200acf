"""A collector of traces: OTLP over HTTP, as far as a test needs to read what was sent."""

import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    name: str
    kind: int
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any]
    service: str
    instance: str
    """The process that sent it."""


@dataclass
class Collector:
    """Listens on a port of loopback; what came is in `spans`, whole requests at a time."""

    spans: list[Span] = field(default_factory=list)
    raw: bytes = b""
    seen: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> "Collector":
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.seen[self.path] += 1
                collector.raw += body
                collector.spans += list(spans_of(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def spans_of(body: bytes):
    request = ExportTraceServiceRequest.FromString(body)
    for of_process in request.resource_spans:
        resource = _attributes(of_process.resource.attributes)
        for scope in of_process.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.name,
                    span.kind,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    _attributes(span.attributes),
                    resource["service.name"],
                    resource["service.instance.id"],
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
