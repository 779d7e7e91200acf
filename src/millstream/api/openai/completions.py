"""A text completion as OpenAI writes it: the whole object, or its chunks, which have its form."""

from collections.abc import Sequence
from typing import Any

from millstream.api import sse
from millstream.api.choices import Told
from millstream.api.errors import unfinished
from millstream.api.openai.endings import finish_reason_of, sum_usage
from millstream.shared.events import Event
from millstream.shared.schemas import SamplingParams
from millstream.shared.states import TaskState


class Completion:
    """What the whole answer, or all its chunks, have in common.

    Args:
        task_id: Of its first task.
        model: Its name.
        created: Unix time.
        prompts: How many prompts there are; each has as many choices, one after the other.
        choices: How many choices there are in all.
        include_usage: Whether a stream ends with the usage.
    """

    def __init__(
        self,
        task_id: str,
        *,
        model: str,
        created: int,
        prompts: int,
        choices: int,
        include_usage: bool = False,
    ) -> None:
        self._head = {
            "id": f"cmpl-{task_id}",
            "object": "text_completion",
            "created": created,
            "model": model,
        }
        self._prompts = prompts
        self._include_usage = include_usage
        self._usages: list[dict[str, int] | None] = [None] * choices

    def whole(self, choices: Sequence[Told], sampling: SamplingParams) -> dict[str, Any]:
        """The whole answer."""
        bodies = [choice.end.body for choice in choices]
        rows = [
            _choice(
                index,
                choice.text,
                Offsets().of(choice.tokens) if sampling.logprobs is not None else None,
                finish_reason_of(body["finish_reason"]),
            )
            for index, (choice, body) in enumerate(zip(choices, bodies, strict=True))
        ]
        usage = sum_usage([body["usage"] for body in bodies], prompts=self._prompts)
        return {**self._head, "choices": rows, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], **fields: Any) -> str:
        """The frame of a chunk."""
        usage = {"usage": None} if self._include_usage else {}
        return sse.data_frame({**self._head, "choices": choices, **usage, **fields})

    def closing(self, index: int, usage: dict[str, int]) -> str:
        """What comes after the end of a choice: after the last one usage, if asked for, and [DONE].

        Args:
            index: Which choice has ended.
            usage: Its own.
        """
        self._usages[index] = usage
        usages = [usage for usage in self._usages if usage is not None]
        if len(usages) < len(self._usages):
            return ""
        if not self._include_usage:
            return sse.DONE
        return self.chunk([], usage=sum_usage(usages, prompts=self._prompts)) + sse.DONE


class CompletionChoice:
    """The frames of one choice.

    Args:
        completion: What all choices share.
        index: Which of them it is.
        sampling: What its task was asked.
    """

    ping = sse.OPENAI_PING
    resumable = False

    def __init__(self, completion: Completion, index: int, sampling: SamplingParams) -> None:
        self._completion = completion
        self._index = index
        self._offsets = None if sampling.logprobs is None else Offsets()
        head, tail = completion.chunk([_choice(index, "\0", None, None)]).split('"\\u0000"')
        self._head, self._tail = head, tail

    def opening(self) -> str:
        """Nothing: a completion says nothing before its text."""
        return ""

    def frames(self, events: Sequence[Event]) -> str:
        """A chunk for each event that has text, or log probabilities that were asked for."""
        if self._offsets is None:
            texts = (event.text_data for event in events)
            return "".join(f"{self._head}{text}{self._tail}" for text in texts if text != '""')
        return "".join(
            self._completion.chunk(
                [_choice(self._index, event.text, self._offsets.of([event]), None)]
            )
            for event in events
            if event.data != '""'
        )

    def ending(self, event: Event) -> str:
        """The frames after the last token: nothing is called finished that is not."""
        if event.kind != TaskState.COMPLETED:
            return sse.data_frame(unfinished(event))
        body = event.body
        end = _choice(self._index, "", None, finish_reason_of(body["finish_reason"]))
        return self._completion.chunk([end]) + self._completion.closing(self._index, body["usage"])

    def trouble(self, error: dict[str, Any]) -> str:
        """An error object in place of the rest."""
        return sse.data_frame(error)

    def farewell(self, error: dict[str, Any]) -> str:
        """The same: no client of this form comes back."""
        return self.trouble(error)


class Offsets:
    """The log probabilities of one choice in this form's columns, as its events come."""

    def __init__(self) -> None:
        self._length = 0
        """Characters of the text so far."""

    def of(self, events: Sequence[Event]) -> dict[str, Any]:
        """The columns for the next events; a token's offset is where its event's text begins."""
        columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for event in events:
            for token in event.logprobs:
                top = {other.token: other.logprob for other in token.top_logprobs}
                columns["tokens"].append(token.token)
                columns["token_logprobs"].append(token.logprob)
                columns["top_logprobs"].append({**top, token.token: token.logprob})
                columns["text_offset"].append(self._length)
            self._length += len(event.text)
        return columns


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
