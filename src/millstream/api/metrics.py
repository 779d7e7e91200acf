"""What a pod tells Prometheus."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder

from millstream.api.fleet_metrics import fleet_families
from millstream.api.pod import Pod
from millstream.api.request_counts import RequestCounts
from millstream.shared.metrics.families import counter, gauge, process_families, registry_of

# Prometheus waits ten seconds for an answer. A Redis that is there has told all in a tenth of this.
LOOK_S = 0.5


class PodMetrics:
    """The metrics of one pod, made from its collaborators' own figures when they are read."""

    def __init__(self, pod: Pod, counts: RequestCounts) -> None:
        self._pod = pod
        self._counts = counts
        self._registry = registry_of(self)

    async def text(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the form that a scraper's `Accept` asks for, and that form's media type.

        Of the fleet what is known by then, while Redis is away or slow.
        """
        await self._pod.fleet_watch.look(within_s=LOOK_S)
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def __iter__(self) -> Iterator[Metric]:
        pod, counts = self._pod, self._counts
        yield from process_families("api", pod.calls, pod.lag, reconnects=pod.feed.reconnects)
        yield counter(
            "http_requests",
            "Answers that began, by route.",
            ("method", "route", "status"),
            counts.answered,
        )
        yield counter(
            "requests_refused",
            "Requests that were answered with an error, by its code.",
            ("status", "code"),
            counts.refused,
        )
        yield counter(
            "tasks_accepted",
            "Tasks that were put into a queue.",
            ("model", "priority"),
            pod.admission.accepted,
        )
        yield counter(
            "stops",
            "Tasks that were stopped: asked for, or because the client left.",
            ("cause",),
            {(cause,): count for cause, count in pod.stops.items()},
        )
        yield gauge("streams_open", "Readers of tasks on this pod.", (), {(): pod.feed.streams})
        relay = pod.relay
        for name, text, value in (
            ("events_relayed", "Events of tasks that were given to readers.", pod.feed.given),
            ("stream_resumes", "Readers that came back for what follows an event.", relay.resumes),
            ("log_reads", "Times that a reader which was behind read the log.", relay.log_reads),
            (
                "log_rewinds",
                "Readers who were told that Redis has lost what they read or had read.",
                relay.rewinds,
            ),
        ):
            yield counter(name, text, (), {(): value})
        yield gauge(
            "pod_draining", "1 once the pod has been told to go.", (), {(): int(pod.closing)}
        )
        if pod.fleet_watch.last is not None:
            yield from fleet_families(pod.fleet_watch.last)
