"""What a worker counts of its jobs: plain numbers, a few a step and none a token but one."""

import time
from collections import Counter
from collections.abc import Sequence

from millstream.shared.metrics.tally import (
    BETWEEN_TOKENS_S,
    FIRST_TOKEN_S,
    ROWS,
    TASK_S,
    TOKENS,
    Tally,
)
from millstream.shared.states import Priority
from millstream.worker.job import Job


class WorkerMetrics:
    """Figures on jobs since the start; written on the event loop, read from any thread.

    What is told of a task (its waits, its length) is told once, by the worker that ended it or made
    its first token, and counts from the submit, whatever workers it had before.
    """

    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter(first=0, takeover=0, handover=0, fault=0)
        """Attempts that began here: a task's first, after a loss, after a drain, after an engine
        gave it up. Nobody would read them of who let a task go: it ends in the next moment."""
        self.ended: Counter[tuple[str, str]] = Counter()
        """Tasks that this worker ended, by state and finish reason or error code."""
        self.prompt_tokens = 0
        """Of prompts that were taken in, again in each attempt."""
        self.replayed_tokens = 0
        """Of earlier attempts' answers, taken in again."""
        self.generated_tokens = 0
        self.queue_wait = {priority: Tally(TASK_S) for priority in Priority}
        """From submit to the first start."""
        self.prefill = Tally(FIRST_TOKEN_S)
        """From an attempt's start to its first token."""
        self.first_token = Tally(FIRST_TOKEN_S)
        """From submit to a task's first token."""
        self.between_tokens = Tally(BETWEEN_TOKENS_S)
        """From token to token of one attempt."""
        self.whole_task = Tally(TASK_S)
        """From submit to the end."""
        self.prompt_length = Tally(TOKENS)
        self.answer_length = Tally(TOKENS)
        self.batch = Tally(ROWS)
        """Requests that got something in one step."""
        self._stepped_at = -1.0

    @property
    def reclaimed(self) -> int:
        """Attempts that began here and were not the first."""
        return self.attempts.total() - self.attempts["first"]

    def claimed(self, job: Job) -> None:
        """A job is about to begin."""
        if job.attempt == 1:
            self.attempts["first"] += 1
            self.queue_wait[job.priority].add(job.age_s)
        elif job.handed_over:
            self.attempts["handover"] += 1
        else:  # what a worker gave up because of its engine has nobody who was lost with it
            self.attempts["takeover" if job.predecessor else "fault"] += 1

    def began(self, job: Job) -> None:
        """Its prompt has been counted."""
        self.prompt_tokens += job.prompt_tokens
        self.replayed_tokens += job.inherited

    def stepped(self, came: Sequence[tuple[Job, int]], now: float) -> None:
        """A step has brought so many tokens for each of these jobs, none where one only ended."""
        before, self._stepped_at = self._stepped_at, now
        tokens = alike = 0
        for job, count in came:
            tokens += count
            if count == 1 and job.token_at == before:  # nearly always
                alike += 1
                job.token_at = now
            elif count:
                self._out_of_step(job, count, now)
        self.generated_tokens += tokens
        if alike:
            self.between_tokens.add(now - before, alike)
        self.batch.add(len(came))

    def _out_of_step(self, job: Job, tokens: int, now: float) -> None:
        """A job had no token in the step before, or has several now."""
        last, job.token_at = job.token_at, now
        if last:
            self.between_tokens.add((now - last) / tokens, tokens)
            return
        job.first_token_at = now
        self.prefill.add(now - job.claimed_at)
        if not job.inherited:
            self.first_token.add(job.age_s + now - job.claimed_at)
        if tokens > 1:
            self.between_tokens.add(0.0, tokens - 1)

    def finished(self, job: Job) -> None:
        """A task has come to its end, written by us."""
        self.ended[job.outcome, job.reason] += 1
        self.whole_task.add(job.age_s + time.monotonic() - job.claimed_at)
        self.prompt_length.add(job.prompt_tokens)
        self.answer_length.add(job.tokens)
