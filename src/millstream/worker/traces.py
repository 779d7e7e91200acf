"""The spans of a worker's attempts: each written in one go, so a token costs nothing."""

import time
from typing import TYPE_CHECKING

from millstream.shared.states import TaskState
from millstream.shared.tracing import operation_of, request_attributes
from millstream.worker.job import Job

if TYPE_CHECKING:  # an extra
    from opentelemetry.trace import Span

    from millstream.shared.otlp import Tracing


class AttemptTraces:
    """Continues the traces of tasks, as far as their requests were traced.

    An attempt's span is told when it ends, which a worker that is killed never does. So what says
    who had a task is told by others: the wait in the queue, at once at the claim, and a lost
    attempt, by the worker that takes over.

    Args:
        tracing: Makes the spans; None: nobody wants them, and nothing is done.
        worker_id: Who we are.
    """

    def __init__(self, tracing: "Tracing | None", worker_id: str) -> None:
        self._tracing = tracing
        self._worker_id = worker_id
        self._open: dict[str, tuple[Span, int]] = {}
        """The attempts that run here, each with its beginning in ns of Unix time."""

    def claimed(self, job: Job) -> None:
        """A job is about to begin."""
        if self._tracing is None or not job.request.traceparent:
            return
        now = time.time_ns()
        parent = {"traceparent": job.request.traceparent}
        of_task = {"millstream.task.id": job.task_id}
        of_attempt = of_task | {
            "millstream.worker.id": self._worker_id,
            "millstream.attempt.number": job.attempt,
        }
        if job.attempt == 1:
            waited = now - round(job.age_s * 1e9)
            of_queue = of_attempt | {"millstream.priority": job.priority.value}
            self._tracing.begin(
                "queue", "internal", parent=parent, attributes=of_queue, start_ns=waited
            ).end(now)
        elif job.predecessor:
            of_lost = of_task | {
                "millstream.worker.id": job.predecessor,
                "millstream.attempt.number": job.attempt - 1,
                "millstream.attempt.outcome": "lost",
            }
            lost = self._tracing.begin(
                "lost attempt", "internal", parent=parent, attributes=of_lost, start_ns=now
            )
            self._tracing.fail(lost, "worker_lost")
            lost.end(now)
        span = self._tracing.begin(
            f"{operation_of(job.request)} {job.request.model}",
            "consumer",
            parent=parent,
            attributes=of_attempt | request_attributes(job.request),
            start_ns=now,
        )
        self._open[job.request_id] = (span, now)

    def ended(self, job: Job, outcome: str) -> None:
        """A job is no longer ours; only the first call for one counts.

        Args:
            job: The job.
            outcome: The state in which we ended it, `handed_over`, or `left`: it was stopped, or
                another worker has it.
        """
        span, began = self._open.pop(job.request_id, (None, 0))
        if span is None or self._tracing is None:
            return
        now = time.time_ns()
        first_token = now
        if job.first_token_at:
            first_token = began + round((job.first_token_at - job.claimed_at) * 1e9)
            self._part("decode", span, first_token, now)
        self._part("prefill", span, began, first_token)
        span.set_attributes(
            {
                "millstream.attempt.outcome": outcome,
                "millstream.attempt.replayed_tokens": job.inherited,
                "gen_ai.usage.input_tokens": job.prompt_tokens,
                "gen_ai.usage.output_tokens": job.tokens,
            }
        )
        if outcome == TaskState.COMPLETED:
            span.set_attribute("gen_ai.response.finish_reasons", (job.reason,))
        elif outcome == TaskState.FAILED:
            self._tracing.fail(span, job.reason)
        span.end(now)

    def _part(self, name: str, span: "Span", start_ns: int, end_ns: int) -> None:
        assert self._tracing is not None  # noqa: S101 - there is a span
        part = self._tracing.begin(name, "internal", parent=span, attributes={}, start_ns=start_ns)
        part.end(end_ns)
