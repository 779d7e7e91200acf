"""Metrics in the forms of Prometheus's client library.

Nothing is kept here. A family is made from plain numbers at the moment somebody reads it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from millstream import __version__
from millstream.shared.metrics.calls import CallStats
from millstream.shared.metrics.loop_lag import LoopLag
from millstream.shared.metrics.tally import Tally

PREFIX = "millstream_"

Labelled = Mapping[tuple[str, ...], float]
"""A value for each combination of labels."""


def counter(name: str, text: str, labels: Sequence[str], values: Labelled) -> Metric:
    """What only grows; `_total` is put after its name."""
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def gauge(name: str, text: str, labels: Sequence[str], values: Labelled) -> Metric:
    """What goes up and down."""
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def histogram(
    name: str, text: str, labels: Sequence[str], tallies: Mapping[tuple[str, ...], Tally]
) -> Metric:
    """How values are spread."""
    family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
    for key, tally in tallies.items():
        buckets = [(_edge(edge), count) for edge, count in tally.buckets()]
        family.add_metric(key, buckets, tally.sum)
    return family


def _edge(edge: float) -> str:
    return "+Inf" if edge == float("inf") else str(float(edge))


def process_families(
    role: str, calls: CallStats, lag: LoopLag, *, reconnects: int
) -> Iterator[Metric]:
    """What every process tells."""
    yield gauge(
        "build_info", "Which version runs; always 1.", ("version", "role"), {(__version__, role): 1}
    )
    yield gauge("redis_up", "1 if Redis answered the last call.", (), {(): calls.up})
    seconds = {(name,): tally for name, tally in list(calls.seconds.items())}
    yield histogram("redis_call_seconds", "What calls to Redis take.", ("call",), seconds)
    yield counter(
        "redis_errors",
        "Calls to Redis that failed: it was away, or refused them.",
        ("call", "kind"),
        dict(calls.errors),
    )
    yield counter(
        "redis_reconnects",
        "Subscriptions that were lost and made again.",
        (),
        {(): reconnects},
    )
    yield histogram("event_loop_lag_seconds", "How late the event loop is.", (), {(): lag.seconds})


class _Collected(Collector):
    """A collector as a registry wants it."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return iter(self._families)


def registry_of(families: Iterable[Metric]) -> CollectorRegistry:
    """A registry of what `families` makes whenever it is gone through, and of the process."""
    registry = CollectorRegistry()
    registry.register(_Collected(families))
    ProcessCollector(registry=registry)
    return registry
