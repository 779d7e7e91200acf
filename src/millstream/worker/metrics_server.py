"""Serves a worker's metrics, on a thread and a port of its own: a worker is no web server."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import Metric, start_http_server

from millstream.shared.listener import explain
from millstream.shared.metrics.calls import CallStats
from millstream.shared.metrics.families import (
    counter,
    gauge,
    histogram,
    process_families,
    registry_of,
)
from millstream.shared.metrics.loop_lag import LoopLag
from millstream.shared.registry import WorkerInfo
from millstream.shared.states import WorkerState
from millstream.worker.job import Job
from millstream.worker.metrics import WorkerMetrics


def serve_metrics(families: "WorkerFamilies", *, host: str, port: int) -> None:
    """Answer `GET /metrics` from now on, to the process's end.

    Raises:
        PortTaken: another program has the port.
        SettingsError: the host or the port can never be had.
    """
    try:
        start_http_server(port, addr=host, registry=registry_of(families))
    except OSError as error:
        raise explain(error, host, port) from None


class WorkerFamilies:
    """What a worker tells; every method of its sources may be called from any thread.

    Args:
        metrics: Figures on its jobs.
        describe: The worker as the roster has it.
        jobs: Its jobs at this moment.
        cache_tokens: Tokens that its KV cache holds; 0: unknown or without bound.
        calls: Its calls to Redis.
        lag: Its event loop.
        reconnects: How often its subscriptions were lost and made again.
    """

    def __init__(
        self,
        metrics: WorkerMetrics,
        *,
        describe: Callable[[], WorkerInfo],
        jobs: Callable[[], Sequence[Job]],
        cache_tokens: Callable[[], int],
        calls: CallStats,
        lag: LoopLag,
        reconnects: Callable[[], int],
    ) -> None:
        self._metrics = metrics
        self._describe = describe
        self._jobs = jobs
        self._cache_tokens = cache_tokens
        self._calls = calls
        self._lag = lag
        self._reconnects = reconnects

    def __iter__(self) -> Iterator[Metric]:
        info = self._describe()
        yield from process_families("worker", self._calls, self._lag, reconnects=self._reconnects())
        yield from self._of_the_worker(info)
        yield from self._counts(info.model, info.stale_refused)
        yield from self._spreads(info.model)

    def _of_the_worker(self, info: WorkerInfo) -> Iterator[Metric]:
        model = (info.model,)
        states = {(info.model, state): int(state == info.state) for state in WorkerState}
        yield gauge("worker_state", "1 at the state the worker is in.", ("model", "state"), states)
        yield gauge("slots", "Tasks it can run at once.", ("model",), {model: info.slots})
        yield gauge("running_tasks", "Tasks it runs.", ("model",), {model: info.running})
        used = sum(job.prompt_tokens + job.tokens for job in self._jobs())
        yield gauge(
            "kv_cache_used_tokens",
            "Tokens of the tasks it runs, those that share a prefix counted each.",
            ("model",),
            {model: used},
        )
        if most := self._cache_tokens():
            yield gauge(
                "kv_cache_max_tokens", "Tokens its KV cache holds.", ("model",), {model: most}
            )

    def _counts(self, model: str, stale_refused: int) -> Iterator[Metric]:
        metrics = self._metrics
        yield counter(
            "attempts",
            "Attempts that began: the first, after a loss, in a drain, after an engine's fault.",
            ("model", "cause"),
            {(model, cause): count for cause, count in list(metrics.attempts.items())},
        )
        yield counter(
            "tasks_ended",
            "Tasks it brought to their end, by finish reason or error code.",
            ("model", "state", "reason"),
            {(model, *how): count for how, count in list(metrics.ended.items())},
        )
        for name, text, value in (
            ("stale_writes_refused", "Writes refused: the task had moved on.", stale_refused),
            ("prompt_tokens", "Tokens of prompts taken in.", metrics.prompt_tokens),
            (
                "replayed_tokens",
                "Tokens of lost attempts that were taken in again.",
                metrics.replayed_tokens,
            ),
            ("generation_tokens", "Tokens made.", metrics.generated_tokens),
        ):
            yield counter(name, text, ("model",), {(model,): value})

    def _spreads(self, model: str) -> Iterator[Metric]:
        metrics = self._metrics
        yield histogram(
            "queue_wait_seconds",
            "From submit to the first start.",
            ("model", "priority"),
            {(model, priority): tally for priority, tally in metrics.queue_wait.items()},
        )
        for name, text, tally in (
            ("prefill_seconds", "From an attempt's start to its first token.", metrics.prefill),
            (
                "time_to_first_token_seconds",
                "From submit to a task's first token.",
                metrics.first_token,
            ),
            ("inter_token_latency_seconds", "From token to token.", metrics.between_tokens),
            ("e2e_latency_seconds", "From submit to a task's end.", metrics.whole_task),
            ("request_prompt_tokens", "Tokens of a task's prompt.", metrics.prompt_length),
            ("request_generation_tokens", "Tokens of a task's answer.", metrics.answer_length),
            ("batch_size_tasks", "Tasks that got something in one step.", metrics.batch),
        ):
            yield histogram(name, text, ("model",), {(model,): tally})
