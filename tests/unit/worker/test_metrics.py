"""What a worker counts of its jobs."""

from typing import Any

from millstream.shared.events import Event, token_data
from millstream.shared.schemas import TaskRequest
from millstream.shared.states import Priority
from millstream.shared.steps import Claim
from millstream.worker.job import Job
from millstream.worker.metrics import WorkerMetrics


def job_of(task_id: str = "t0-x", *, attempt: int = 1, log: int = 0, **fields: Any) -> Job:
    events = [Event(seq, "t", "7", token_data("x")) for seq in range(1, log + 1)]
    job = Job(Claim(task_id, attempt, b"", events, **fields), TaskRequest("m"), 0)
    job.claimed_at = 100.0
    return job


def test_tokens_of_jobs_in_step_are_counted_together() -> None:
    metrics = WorkerMetrics()
    one, other = job_of("t0-a"), job_of("t0-b")
    for now, jobs in ((101, [one]), (102, [one, other]), (103, [one, other]), (107, [one])):
        metrics.stepped([(job, 1) for job in jobs], now)
    assert metrics.generated_tokens == 6
    # one: 1, 1, 4 s; other: 1 s
    assert (metrics.between_tokens.count, metrics.between_tokens.sum) == (4, 7.0)
    assert (metrics.batch.count, metrics.batch.sum) == (4, 6)
    assert metrics.prefill.sum == metrics.first_token.sum == 1 + 2
    metrics.stepped([(other, 1)], 110)  # after a step without it
    assert (metrics.between_tokens.count, metrics.between_tokens.sum) == (5, 14.0)


def test_several_tokens_of_a_step_share_its_time() -> None:
    metrics = WorkerMetrics()
    job = job_of()
    metrics.stepped([(job, 3)], 101)
    metrics.stepped([(job, 4)], 103)
    assert metrics.generated_tokens == 7
    assert metrics.between_tokens.count == 6
    assert dict(metrics.between_tokens.buckets())[0.5] == 6
    assert metrics.between_tokens.sum == 2.0


def test_a_loss_is_told_apart_from_a_drain_and_from_an_engines_fault() -> None:
    metrics = WorkerMetrics()
    metrics.claimed(job_of(age_s=2.0, priority=Priority.BATCH))
    metrics.claimed(job_of(attempt=2, age_s=9.0, predecessor="worker-1"))
    metrics.claimed(job_of(attempt=3, age_s=9.0, predecessor="worker-2"))
    metrics.claimed(job_of(attempt=2, age_s=9.0, handed_over=True))
    metrics.claimed(job_of(attempt=2, age_s=9.0))
    assert metrics.attempts == {"first": 1, "takeover": 2, "handover": 1, "fault": 1}
    assert metrics.reclaimed == 4
    waits = {priority: tally.sum for priority, tally in metrics.queue_wait.items()}
    assert waits == {Priority.INTERACTIVE: 0, Priority.BATCH: 2.0}


def test_the_first_token_of_a_task_is_waited_for_once() -> None:
    metrics = WorkerMetrics()
    metrics.stepped([(job_of(age_s=0.5), 1)], 101)
    metrics.stepped([(job_of(attempt=2, log=4, age_s=30.0), 1)], 102)
    assert (metrics.first_token.count, metrics.first_token.sum) == (1, 1.5)
    assert (metrics.prefill.count, metrics.prefill.sum) == (2, 3.0)
