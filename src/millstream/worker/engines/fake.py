"""An engine without a model, for tests and load: exact texts, exact rates, faults on demand.

What it says and does is in `fake_script`; here is when. Like a real engine it makes steps on a
thread of its own and gives each request that is due one token a step.
"""

import asyncio
import heapq
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from millstream.shared.errors import InvalidRequest
from millstream.worker.engines.base import (
    EngineHealth,
    EngineInfo,
    EngineSettings,
    GenerationRequest,
    OnStep,
    StepOutput,
)
from millstream.worker.engines.fake_script import (
    VOCABULARY,
    FakeTokenizer,
    Script,
    is_token_id,
    read_script,
)

CONTEXT_LENGTH = 1_000_000
CRASH_EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h."""

# Steps that may wait for the loop: enough that the thread does not pause after each, few enough
# that a blocked loop finds next to nothing in memory.
_STEPS_AHEAD = 4
# While requests wait for their time, an empty step is made this often: a real engine's steps go on
# then too, and the watchdog must not take a slow rate for a hang. Well under any lease.
_EMPTY_STEP_S = 0.1
# A request that is further behind its rate than this does not catch up on the rest: after a pause
# of the whole process nobody wants minutes of tokens in one burst.
_CATCH_UP_S = 1.0
# A crash waits for the loop to run the last step, then this long for the publisher to send it:
# the time that a real engine's next step would take. The first wait is bounded too, since a
# blocked loop must not save the process.
_CRASH_LOOP_WAIT_S = 1.0
_CRASH_PUBLISH_WAIT_S = 0.05
# How long an idle thread sleeps before it looks around; nothing depends on it.
_IDLE_S = 1.0
_JOIN_S = 5.0

_log = logging.getLogger(__name__)


class _Generation:
    """One request on its way."""

    __slots__ = (
        "_interval",
        "_logprobs",
        "_remaining",
        "_request_id",
        "cancelled",
        "due",
        "position",
        "script",
    )

    def __init__(self, request: GenerationRequest, script: Script, default_rate: float) -> None:
        self.script = script
        self.position = len(request.token_ids) - request.prompt_length
        """Of the next token, over all attempts."""
        self.cancelled = False
        rate = default_rate if script.directive.rate is None else script.directive.rate
        # A task that another worker took over has had its delay, unless that was its prefill.
        self.due = time.monotonic() + (self._delay if self.position == 0 else 0.0)
        self._interval = 1 / rate if rate else 0.0
        self._remaining = min(request.max_new_tokens, CONTEXT_LENGTH - len(request.token_ids))
        self._request_id = request.request_id
        self._logprobs = request.logprobs

    def __lt__(self, other: "_Generation") -> bool:
        return self.due < other.due

    def is_next(self, number: int | None) -> bool:
        """Whether the next token is this one, counted from 1."""
        return self.position + 1 == number

    @property
    def _delay(self) -> float:
        """How long the next token is held back."""
        directive = self.script.directive
        return directive.delay_s if self.position + 1 in directive.delay_at else 0.0

    def schedule_next(self, now: float) -> None:
        """Set the time of the next token by the last one's, so that delays do not add up."""
        if self._delay:
            self.due = now + self._delay
        else:
            self.due = max(self.due + self._interval, now - _CATCH_UP_S)

    def next_output(self) -> StepOutput:
        """Make the next token, or the end, which is a step of its own as a real end token is."""
        if self.is_next(self.script.directive.error_at):
            message = f"the fake engine failed at token {self.position + 1}, as it was told"
            return StepOutput(self._request_id, finish="error", error=message)
        if self.position >= self.script.tokens:
            return StepOutput(self._request_id, finish="stop")
        token_id = self.script.token_at(self.position)
        logprobs = (
            ()
            if self._logprobs is None
            else (self.script.logprobs_at(self.position, self._logprobs),)
        )
        self.position += 1
        self._remaining -= 1
        finish = None if self._remaining else "length"
        return StepOutput(self._request_id, (token_id,), finish, logprobs=logprobs)


_Step = list[tuple[_Generation, StepOutput]]


class FakeEngine:
    """Generates words by a hash, or what a `@fake` line of the prompt says."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._tokenizer = FakeTokenizer()
        self._thread: threading.Thread | None = None
        self._live: dict[str, _Generation] = {}
        """Submitted and not finished; only the event loop changes it."""
        # All below is shared with the thread and guarded by the condition.
        self._changed = threading.Condition()
        self._due: list[_Generation] = []
        """A heap: who comes next."""
        self._steps = 0
        self._handed = 0
        """Steps given to the loop."""
        self._run = 0
        """Steps that the loop has run."""
        self._stopping = threading.Event()
        self._fatal: str | None = None

    @property
    def tokenizer(self) -> FakeTokenizer:
        """A tokenizer without a vocabulary."""
        return self._tokenizer

    async def start(self, on_step: OnStep) -> EngineInfo:
        """Start the thread; there is nothing to load."""
        loop = asyncio.get_running_loop()

        def post(step: _Step) -> None:
            loop.call_soon_threadsafe(self._deliver, on_step, step)

        # A daemon, so that a hang does not keep the process from ending.
        self._thread = threading.Thread(
            target=self._main, args=(post,), name="fake-engine", daemon=True
        )
        self._thread.start()
        return EngineInfo(
            vocabulary_size=VOCABULARY,
            context_length=CONTEXT_LENGTH,
            cache_tokens=0,
            numerics="fake",
        )

    def submit(self, request: GenerationRequest) -> None:
        """Take a request into the batch.

        Raises:
            InvalidRequest: it is empty, too long, submitted already, or its directive is wrong.
        """
        if request.request_id in self._live:
            raise InvalidRequest(f"Request {request.request_id} is running already.")
        if request.max_new_tokens < 1:
            raise InvalidRequest("At least one token must be asked for.", param="max_tokens")
        _check_ids(request.token_ids, request.prompt_length)
        if not all(map(is_token_id, request.logit_bias)):
            raise InvalidRequest("logit_bias has an id that is no token.", param="logit_bias")
        script = read_script(request.token_ids[: request.prompt_length], request.seed)
        generation = _Generation(request, script, self._settings.fake_tokens_per_s)
        self._live[request.request_id] = generation
        with self._changed:
            heapq.heappush(self._due, generation)
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """Drop a request; steps that are on their way to the loop lose its tokens there."""
        generation = self._live.pop(request_id, None)
        if generation is None:
            return
        with self._changed:
            generation.cancelled = True
            self._due = [other for other in self._due if other is not generation]
            heapq.heapify(self._due)
            self._changed.notify_all()

    def health(self) -> EngineHealth:
        """How the engine does."""
        return EngineHealth(active=len(self._live), steps=self._steps, fatal=self._fatal)

    async def stop(self) -> None:
        """End all requests without further outputs; ends a hang as well."""
        self._live.clear()
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _JOIN_S)

    # On the event loop.

    def _deliver(self, on_step: OnStep, step: _Step) -> None:
        """Hand a step over, without what has been cancelled since."""
        outputs: list[StepOutput] = []
        for generation, output in step:
            # By identity: the id of a cancelled request may have been given to a new one.
            if self._live.get(output.request_id) is generation:
                outputs.append(output)
                if output.finish is not None:
                    del self._live[output.request_id]
        try:
            if outputs:
                on_step(outputs)
        finally:
            with self._changed:
                self._run += 1
                self._changed.notify_all()

    # On the engine's thread.

    def _main(self, post: Callable[[_Step], None]) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                self._strike_faults(batch)
                step = [(generation, generation.next_output()) for generation in batch]
                if self._keep(step):
                    post(step)
        except Exception as error:
            self._fatal = f"the engine thread died: {error!r}"
            _log.exception("the fake engine's thread died")

    def _next_batch(self) -> list[_Generation] | None:
        """Wait until requests are due and the loop keeps up; None at the stop."""
        with self._changed:
            while not self._stopping.is_set():
                now = time.monotonic()
                if self._handed - self._run >= _STEPS_AHEAD or not self._due:
                    self._changed.wait(_IDLE_S)
                elif self._due[0].due > now:
                    self._changed.wait(min(self._due[0].due - now, _EMPTY_STEP_S))
                    self._steps += 1
                else:
                    return self._pop_due(now)
        return None

    def _pop_due(self, now: float) -> list[_Generation]:
        batch: list[_Generation] = []
        while self._due and self._due[0].due <= now:
            batch.append(heapq.heappop(self._due))
        return batch

    def _strike_faults(self, batch: list[_Generation]) -> None:
        """Crash, hang or die if that is what a request of the batch asks for now."""
        for generation in batch:
            if self._stopping.is_set() or generation.cancelled:
                continue
            if generation.is_next(generation.script.directive.crash_at):
                self._crash()
            if generation.is_next(generation.script.directive.hang_at):
                self._hang()
            if generation.is_next(generation.script.directive.die_at):
                raise RuntimeError(f"it was told to die at token {generation.position + 1}")

    def _keep(self, step: _Step) -> bool:
        """Put back who goes on, and count the step; False if the engine has been stopped."""
        now = time.monotonic()
        with self._changed:
            for generation, output in step:
                if output.finish is None and not generation.cancelled:
                    generation.schedule_next(now)
                    heapq.heappush(self._due, generation)
            self._steps += 1
            self._handed += 1
            return not self._stopping.is_set()

    def _hang(self) -> None:
        """Block until the engine is stopped, without the lock: all else still answers."""
        while not self._stopping.wait(_IDLE_S):
            pass

    def _crash(self) -> NoReturn:
        """End the process as a segmentation fault would, once the step before is out."""
        with self._changed:
            self._changed.wait_for(lambda: self._run == self._handed, _CRASH_LOOP_WAIT_S)
        self._stopping.wait(_CRASH_PUBLISH_WAIT_S)
        os._exit(CRASH_EXIT_CODE)


def _check_ids(token_ids: Sequence[int], prompt_length: int) -> None:
    if not 0 < prompt_length <= len(token_ids):
        raise InvalidRequest("The prompt is empty.", param="prompt")
    if len(token_ids) >= CONTEXT_LENGTH:
        raise InvalidRequest(
            f"Prompt and answer have {len(token_ids)} tokens; the model's context has "
            f"{CONTEXT_LENGTH}.",
            param="prompt",
            code="context_length_exceeded",
        )
    if not all(map(is_token_id, token_ids)):
        raise InvalidRequest("The prompt has an id that is no token.", param="prompt")
