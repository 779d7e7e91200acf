"""The jobs a worker runs: from a claim to the engine, from the engine's steps to the publisher."""

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec

from millstream.shared.content_filter import Filters, refused_prompt
from millstream.shared.errors import InvalidRequest, LogIncomplete
from millstream.shared.schemas import TaskRequest, decode_request, shard_of
from millstream.shared.steps import Claim
from millstream.worker.engines.base import Engine, StepOutput
from millstream.worker.job import Job, Limits
from millstream.worker.logprobs import LogprobWriter
from millstream.worker.metrics import WorkerMetrics
from millstream.worker.token_events import TokenEvents
from millstream.worker.traces import AttemptTraces

logger = logging.getLogger(__name__)

SHORT_CHARS = 300  # tokenized in 0.3 ms at most; another thread would take 0.04 to 0.1 more
COUNTED_S = 0.02  # a first token that comes sooner need not wait for the answer to a call before it


class Runner:
    """Owns the jobs; everything here runs on the event loop, but for tokenizing.

    Args:
        engine: A started engine.
        limits: What bounds every generation.
        filters: What looks at prompts and answers. Pods have looked at prompts that are text, where
            prompts are looked at.
        metrics: Told of what jobs do.
        traces: Told of what begins.
        on_unwritten: Told of jobs whose logs lack something, once a step.
        on_engine_error: Told of a job whose generation the engine gave up, and why.
        on_left: Told whenever a job has left.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        filters: Filters,
        metrics: WorkerMetrics,
        traces: AttemptTraces,
        *,
        on_unwritten: Callable[[Sequence[Job]], None],
        on_engine_error: Callable[[Job, str], None],
        on_left: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._filters = filters
        self._metrics = metrics
        self._traces = traces
        self._on_unwritten = on_unwritten
        self._on_engine_error = on_engine_error
        self._on_left = on_left
        look, text_bytes = filters.output, engine.tokenizer.text_bytes
        allows = None if look is None else look.allows
        self._logprobs = LogprobWriter(engine.tokenizer, allows)
        self._token_events = None if text_bytes is None else TokenEvents(text_bytes)
        self._jobs: dict[str, Job] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        # One thread: Python's share of tokenizing is small, and prompts are served in order.
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")

    @property
    def running(self) -> int:
        """How many slots are taken."""
        return len(self._jobs)

    @property
    def suspects(self) -> int:
        """How many jobs may be what takes workers down: they have made no progress since."""
        return sum(job.suspect for job in self._jobs.values())

    def jobs(self) -> list[Job]:
        """The jobs at this moment; safe to call from any thread."""
        return list(self._jobs.values())

    def start(self, claim: Claim) -> None:
        """Run a claimed task; one that runs already (an answer came twice) is left alone."""
        request_id = f"{claim.task_id}:{claim.attempt}"
        if request_id in self._jobs:
            return
        shard = shard_of(claim.task_id) or 0
        try:
            job = Job(claim, decode_request(claim.request), shard, self._filters.output)
        except msgspec.MsgspecError:
            logger.exception("not a request", extra={"task_id": claim.task_id})
            self._fail(claim, "This worker does not understand the task's request.")
            return
        if claim.torn:
            logger.error("the log lacks events", extra={"task_id": claim.task_id})
            message = "The fleet's store has lost events of the task, so it cannot go on."
            self._fail(claim, message, LogIncomplete.default_code)
            return
        self._jobs[request_id] = job
        self._metrics.claimed(job)
        self._traces.claimed(job)
        if job.attempt > 1:
            where = {"task_id": job.task_id, "attempt": job.attempt}
            logger.info("took over a task after %d tokens", job.inherited, extra=where)
        if job.request.prompt_chars <= SHORT_CHARS:
            with self._failing(job):
                self._begin(job, self._tokenize(job.request))
            return
        task = asyncio.create_task(self._begin_long(job), name=f"begin {request_id}")
        self._starting[request_id] = task
        task.add_done_callback(lambda _: self._starting.pop(request_id, None))

    def _fail(self, claim: Claim, message: str, code: str = "internal_error") -> None:
        """End a task that no worker can go on with."""
        job = Job(claim, TaskRequest(model=""), shard_of(claim.task_id) or 0)
        self._jobs[job.request_id] = job
        job.fail_internally(message, code)
        self._on_unwritten([job])

    async def _begin_long(self, job: Job) -> None:
        """Begin once the prompt has been tokenized on the other thread."""
        loop = asyncio.get_running_loop()
        with self._failing(job):
            prompt_ids = await loop.run_in_executor(self._tokenizing, self._tokenize, job.request)
            if job.request_id in self._jobs:  # not dropped meanwhile
                self._begin(job, prompt_ids)

    def _begin(self, job: Job, prompt_ids: list[int]) -> None:
        """Hand a job to the engine."""
        generation = job.begin(
            prompt_ids, self._engine.tokenizer, self._limits, self._logprobs, self._token_events
        )
        self._metrics.began(job)
        if generation is not None:
            self._engine.submit(generation)
            asyncio.get_running_loop().call_later(COUNTED_S, self._count, job)

    def _count(self, job: Job) -> None:
        """Have a prompt counted whose first token takes long: the task may be stopped before."""
        if job.request_id in self._jobs and not job.first_token_at:
            self._on_unwritten([job])

    @contextmanager
    def _failing(self, job: Job) -> Generator[None]:
        """End a job that cannot begin."""
        try:
            yield
        except InvalidRequest as error:
            job.fail(error)
        except Exception:
            logger.exception("could not begin", extra={"task_id": job.task_id})
            job.fail_internally("The model could not take this prompt.")
        if job.unwritten:
            self._on_unwritten([job])

    def _tokenize(self, request: TaskRequest) -> list[int]:
        tokenizer, filters = self._engine.tokenizer, self._filters
        look = filters.input if request.prompt_ids else None
        if request.echo and filters.input is None:  # it is told as part of the answer
            look = filters.output
        if look is not None:
            text = tokenizer.decode(request.prompt_ids) if request.prompt_ids else request.prompt
            if not look.allows(text or ""):
                raise refused_prompt("prompt")
        if request.prompt_ids:
            return list(request.prompt_ids)
        if request.prompt is not None:
            return tokenizer.encode(request.prompt)
        return tokenizer.encode_chat(request.messages)

    def on_step(self, outputs: list[StepOutput]) -> None:
        """Take one step of the engine."""
        now = time.monotonic()
        came: list[tuple[Job, int]] = []
        for output in outputs:
            job = self._jobs.get(output.request_id)
            if job is None:
                continue
            finish, token_ids = output.finish, output.token_ids
            if finish == "error":
                self._on_engine_error(job, output.error or "unknown error")
                continue
            job.advance(token_ids, finish, output.logprobs)
            if job.outcome and finish is None:
                self._engine.cancel(job.request_id)  # stop string, filter or doubt
            came.append((job, len(token_ids)))
        if came:
            self._metrics.stepped(came, now)
            self._on_unwritten([job for job, _ in came])

    def drop(self, job: Job) -> None:
        """Forget a job that ended or is no longer ours; its generation ends within a step."""
        if self._jobs.pop(job.request_id, None) is not None:
            self._engine.cancel(job.request_id)
            self._on_left()

    def find(self, task_id: str, attempt: int) -> Job | None:
        """The job of this attempt, if it runs here."""
        return self._jobs.get(f"{task_id}:{attempt}")

    def halt(self) -> list[Job]:
        """Stop generating everything; the jobs as they stand, still owned."""
        for task in list(self._starting.values()):
            task.cancel()
        for job in self._jobs.values():
            self._engine.cancel(job.request_id)
        return self.jobs()

    def close(self) -> None:
        """Free the tokenizing thread."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
