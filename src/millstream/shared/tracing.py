"""OpenTelemetry traces: whether they are wanted, opened late; what spans say of a request."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from millstream.shared.schemas import TaskRequest

if TYPE_CHECKING:  # the library is an extra, and slow to import
    from millstream.shared.otlp import Tracing

logger = logging.getLogger(__name__)

FLUSH_S = 2.0  # a process that is to go does not wait longer for a collector


def tracing_wanted() -> bool:
    """Whether OpenTelemetry's own variables ask for traces; an empty one counts as unset.

    They do by `OTEL_TRACES_EXPORTER=otlp`, or by naming an endpoint of OTLP.
    """
    if _variable("OTEL_SDK_DISABLED").lower() == "true":
        return False
    exporter = _variable("OTEL_TRACES_EXPORTER")
    if exporter:
        return exporter != "none"
    ends = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return any(map(_variable, ends))


@asynccontextmanager
async def open_tracing(role: str, instance: str) -> AsyncGenerator["Tracing | None"]:
    """What makes and sends spans, for as long as the context lasts; None: nobody wants them.

    Also None where they cannot be had: a line says why, for a fleet without traces still serves.

    Args:
        role: `api` or `worker`.
        instance: The id of the process in the fleet.
    """
    tracing = _make(role, instance) if tracing_wanted() else None
    try:
        yield tracing
    finally:
        if tracing is not None:
            # Not on a thread of the loop's pool, which would be waited for without a bound.
            closing = threading.Thread(target=tracing.close, name="send traces", daemon=True)
            closing.start()
            await asyncio.to_thread(closing.join, FLUSH_S)


def _make(role: str, instance: str) -> "Tracing | None":
    exporter = _variable("OTEL_TRACES_EXPORTER") or "otlp"
    protocol = (
        _variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or _variable("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )
    if exporter != "otlp" or protocol != "http/protobuf":
        logger.error("no traces: they go out by otlp over http/protobuf alone")
        return None
    try:
        from millstream.shared.otlp import Tracing
    except ImportError:
        logger.error("no traces: OpenTelemetry is not installed (pip install 'millstream[otel]')")
        return None
    try:
        return Tracing(role, instance)
    except ValueError as error:  # of a variable that the library reads
        logger.error("no traces: %s", error)
        return None


def operation_of(request: TaskRequest) -> str:
    """What is asked for, in the words of the conventions for generative AI."""
    return "chat" if request.messages else "text_completion"


def request_attributes(request: TaskRequest) -> dict[str, str | int | float]:
    """What spans say of a request that was accepted; never a word that its caller wrote."""
    sampling = request.sampling
    attributes: dict[str, str | int | float] = {
        "gen_ai.operation.name": operation_of(request),
        "gen_ai.provider.name": "millstream",
        "gen_ai.request.model": request.model,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
    }
    if sampling.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
    return attributes


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()
