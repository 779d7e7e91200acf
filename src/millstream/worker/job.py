"""One attempt at one task: it turns the engine's token ids into the numbered events of the log."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from millstream.shared.content_filter import ContentFilter
from millstream.shared.errors import InvalidRequest
from millstream.shared.events import error_data, token_data
from millstream.shared.param_names import asked_param
from millstream.shared.schemas import TaskRequest
from millstream.shared.states import FinishReason, TaskState
from millstream.shared.steps import AppendRow, Claim
from millstream.worker.detokenizer import Detokenizer, open_detokenizer
from millstream.worker.early_stop import ConfidenceWindow
from millstream.worker.engines.base import GenerationRequest, Tokenizer, TokenLogprobs
from millstream.worker.logprobs import LogprobWriter, rounded
from millstream.worker.stop_strings import StopMatcher
from millstream.worker.token_events import TokenEvents
from millstream.worker.token_gate import TokenGate, Unfiltered


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a generation besides its own `max_tokens`."""

    context_length: int
    max_tokens: int


class Job:
    """A claimed task while this worker runs it.

    All events of the task stay here until its end, those of earlier attempts included: event number
    k is `events[k - 1]`. So a log that came back from Redis shorter than it was is healed by
    sending again, and the same number never carries other bytes.
    """

    def __init__(
        self,
        claim: Claim,
        request: TaskRequest,
        shard: int,
        output_filter: ContentFilter | None = None,
    ) -> None:
        self.task_id = claim.task_id
        self.attempt = claim.attempt
        self.shard = shard
        self.request = request
        self.request_id = f"{claim.task_id}:{claim.attempt}"
        self.claimed_at = time.monotonic()
        self.age_s = claim.age_s
        """How old the task was then."""
        self.priority = claim.priority
        self.handed_over = claim.handed_over
        """Its last worker let it go, in a drain."""
        self.predecessor = claim.predecessor
        self.first_token_at = 0.0
        """When this attempt's first token came, by the monotonic clock; 0: none has."""
        self.token_at = 0.0
        """When its last one came."""
        self.prompt_tokens = 0
        self._suspect = claim.suspect
        self._inherited = len(claim.log)
        self.written = self._inherited
        """Events known to be in the log."""
        self.outcome = ""
        """'' while it goes on, then the terminal state it will end in."""
        self.reason = ""
        """With the outcome: the finish reason, or the error's code."""
        self._detail = ""
        self._events = [(event.ids, event.data) for event in claim.log]
        self._log = claim.log
        self._token_ids = [token_id for event in claim.log for token_id in event.token_ids]
        self.inherited = len(self._token_ids)
        """Tokens of earlier attempts."""
        self._budget = 0
        self._detokenizer: Detokenizer | None = None
        self._stop_matcher = StopMatcher(request.sampling.stop)
        early_stop = request.sampling.early_stop
        self._confidence = None if early_stop is None else ConfidenceWindow(early_stop)
        self._logprobs: LogprobWriter | None = None
        first = 1 if request.echo else 0
        self._gate: TokenGate | None = None
        if output_filter is not None or (
            request.sampling.stop and request.sampling.logprobs is not None
        ):
            told = sum(len(event.text) for event in claim.log)
            text_filter = Unfiltered() if output_filter is None else output_filter.stream()
            self._gate = TokenGate(text_filter, told=told)
        self._flushed = len(claim.log) > first and not claim.log[-1].ids
        """Whether an earlier attempt got as far as to let go of held-back text."""
        self._plain: TokenEvents | None = None
        """What makes the event of a token that comes alone, where its text is all that matters."""

    def begin(
        self,
        prompt_ids: Sequence[int],
        tokenizer: Tokenizer,
        limits: Limits,
        logprobs: LogprobWriter | None = None,
        token_events: TokenEvents | None = None,
    ) -> GenerationRequest | None:
        """Bring detokenizer and stop strings to where the log stands; what the engine has to do.

        None when nothing is left to generate: the last owner died between its last token and the
        end of the task. `logprobs` writes down how likely tokens were, where that is asked for;
        `token_events` remembers events that are always the same.

        Raises:
            InvalidRequest: the prompt is longer than the model's context.
        """
        self.prompt_tokens = len(prompt_ids)
        room = limits.context_length - self.prompt_tokens
        if room < 0:
            raise InvalidRequest(
                f"The prompt has {self.prompt_tokens} tokens; the model's context holds "
                f"{limits.context_length}.",
                param="prompt",
                code="context_length_exceeded",
            )
        sampling = self.request.sampling
        self._budget = min(room, limits.max_tokens)
        if sampling.max_tokens is not None:
            self._budget = min(self._budget, sampling.max_tokens)
        self._detokenizer = open_detokenizer(tokenizer)
        if sampling.records_logprobs:
            self._logprobs = logprobs or LogprobWriter(tokenizer)
        elif not sampling.stop and self._gate is None:
            self._plain = token_events
        if self.request.echo:
            prompt = self.request.prompt
            self._repeat(tokenizer.decode(prompt_ids) if prompt is None else prompt)
        reason = self._replay()
        self._log = []
        if reason is not None:
            self._finish_text(reason)
            return None
        left = self._budget - len(self._token_ids)
        if left <= 0:
            self._finish_text(FinishReason.LENGTH)
            return None
        return GenerationRequest(
            request_id=self.request_id,
            token_ids=[*prompt_ids, *self._token_ids],
            prompt_length=self.prompt_tokens,
            max_new_tokens=left,
            seed=sampling.seed,
            fallback_seed=_seed_of(self.task_id),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=sampling.logit_bias,
            logprobs=(sampling.logprobs or 0) if sampling.records_logprobs else None,
        )

    def advance(
        self,
        token_ids: Sequence[int],
        finish: str | None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Take what one step brought; past what ends the text the rest is no part of the answer."""
        if self._detokenizer is None or self.outcome:
            return
        if self._plain is not None and finish is None and len(token_ids) == 1:  # nearly always
            event = self._plain[token_ids[0]]
            if event is not None and not self._detokenizer.unfinished:
                self._token_ids.append(token_ids[0])
                self._events.append(event)
                return
        for at, token_id in enumerate(token_ids):
            self._token_ids.append(token_id)
            if self._logprobs is None:
                text, reason = self._push(token_id)
                written = None
            else:
                text, reason = self._push(token_id, rounded(logprobs[at].logprob))
                written = self._logprobs.write([token_id], [logprobs[at]])
            if self._gate is None:
                self._events.append((str(token_id), token_data(text, written)))
            else:
                self._events += self._gate.tell(str(token_id), written)
            if reason is not None:
                self._finish_text(reason)
                return
        if finish is not None:
            self._finish_text(FinishReason(finish))

    def _repeat(self, prompt: str) -> None:
        """Begin the answer with the prompt: its first event, unless an earlier attempt told it."""
        told = bool(self._events)
        if self._gate is not None:
            self._gate.repeat(prompt)
            if not told:
                self._events += self._gate.tell("", None)
        elif not told:
            self._events.append(("", token_data(prompt)))

    def _push(self, token_id: int, logprob: float = 0.0) -> tuple[str, FinishReason | None]:
        """Take a token: the text that becomes certain with it, and why the answer ends there."""
        assert self._detokenizer is not None  # noqa: S101 - `begin` was called
        piece = self._detokenizer.push(token_id)
        text, stopped = self._stop_matcher.push(piece)
        if self._gate is not None:
            self._gate.read(text, made=len(piece), unfinished=self._detokenizer.unfinished)
            if self._gate.matched:
                return "", FinishReason.CONTENT_FILTER
        if stopped:
            return text, FinishReason.STOP
        if self._confidence is not None and self._confidence.push(logprob):
            return text, FinishReason.LOW_CONFIDENCE
        return text, None

    def _replay(self) -> FinishReason | None:
        """Take the tokens of earlier attempts; why the answer ends with them, if it does."""
        for event in self._log:
            logprobs = event.logprobs if self._confidence is not None else []
            for at, token_id in enumerate(event.token_ids):
                _, reason = self._push(token_id, logprobs[at].logprob if logprobs else 0.0)
                if reason is not None:
                    return reason
        return None

    def fail(self, error: InvalidRequest) -> None:
        """End the task as failed by the caller's own doing."""
        self.outcome, self.reason = TaskState.FAILED, error.code
        self._detail = error_data(
            error.message,
            code=error.code,
            param=asked_param(self.request, error.param),
            kind="invalid_request_error",
        )

    def fail_internally(self, message: str, code: str = "internal_error") -> None:
        """End the task as failed by a fault of ours that another attempt would meet too."""
        self.outcome, self.reason = TaskState.FAILED, code
        self._detail = error_data(message, code=code, kind="server_error")

    @property
    def events(self) -> Sequence[tuple[str, str]]:
        """(ids, data) of all token events so far, from the task's first."""
        return self._events

    @property
    def tokens(self) -> int:
        """How many tokens the answer has so far, all attempts together."""
        return len(self._token_ids)

    @property
    def suspect(self) -> bool:
        """Whether the task may be what took its last workers down; progress clears it."""
        return self._suspect and self.written == self._inherited

    @property
    def unwritten(self) -> bool:
        """Whether the log lacks something of this job."""
        return bool(self.outcome) or self.written < len(self._events)

    @property
    def ends_at(self) -> int:
        """The number its terminal event has, or will have."""
        return len(self._events) + 1

    def row(self, most: int) -> AppendRow:
        """What to append next, at most so many events; the end only with the last of them."""
        events = self._events[self.written : self.written + most]
        whole = self.written + len(events) == len(self._events)
        return AppendRow(
            self.task_id,
            self.attempt,
            self.prompt_tokens,
            self.written + 1,
            events,
            self.outcome if whole else "",
            self._detail,
        )

    def _finish_text(self, reason: FinishReason) -> None:
        """Let go of held-back text; a stop string or a match may still come to light in it."""
        text, stopped = "", False
        if self._detokenizer is not None:
            text, stopped = self._stop_matcher.push(self._detokenizer.flush())
        if not stopped:
            text += self._stop_matcher.flush()
            stopped = self._stop_matcher.stopped
        reason = FinishReason.STOP if stopped else reason
        if self._gate is not None:
            self._events += self._gate.finish(text, behind=self._stop_matcher.behind)
            reason = FinishReason.CONTENT_FILTER if self._gate.matched else reason
        elif text and not self._flushed:
            self._events.append(("", token_data(text)))
        self._complete(reason)

    def _complete(self, reason: FinishReason) -> None:
        self.outcome = TaskState.COMPLETED
        self._detail = self.reason = reason


def _seed_of(task_id: str) -> int:
    """A task without a seed gets one that every worker derives alike: 63 bits of its id's hash."""
    digest = hashlib.blake2b(task_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
