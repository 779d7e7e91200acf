"""A chat answer as OpenAI writes it: the whole object, or its chunks."""

from collections.abc import Sequence
from typing import Any

from millstream.api import sse
from millstream.api.choices import Told
from millstream.api.errors import unfinished
from millstream.api.openai.endings import finish_reason_of, sum_usage
from millstream.shared.events import TOKEN, Alternative, Event
from millstream.shared.schemas import SamplingParams, to_json
from millstream.shared.states import TaskState


def completion_id(task_id: str) -> str:
    """The id of an answer, which holds that of its first task."""
    return f"chatcmpl-{task_id}"


def chat_completion(
    task_id: str, *, model: str, created: int, choices: Sequence[Told], logprobs: bool
) -> dict[str, Any]:
    """The whole answer."""
    bodies = [choice.end.body for choice in choices]
    return {
        "id": completion_id(task_id),
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": _logprobs(choice) if logprobs else None,
                "finish_reason": finish_reason_of(body["finish_reason"]),
            }
            for index, (choice, body) in enumerate(zip(choices, bodies, strict=True))
        ],
        "usage": sum_usage([body["usage"] for body in bodies]),
    }


def _logprobs(choice: Told) -> dict[str, Any]:
    content = [
        {**_fields(token), "top_logprobs": [_fields(other) for other in token.top_logprobs]}
        for event in choice.tokens
        for token in event.logprobs
    ]
    return {"content": content, "refusal": None}


def _fields(token: Alternative) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": token.bytes}


class ChatChunks:
    """What the chunks of one streamed answer share, over all its choices."""

    def __init__(
        self, task_id: str, *, model: str, created: int, choices: int, include_usage: bool
    ) -> None:
        head = to_json(
            {
                "id": completion_id(task_id),
                "object": "chat.completion.chunk",
                "created": created,
                "model": model,
            }
        ).decode()[:-1]
        self.head = f'data: {head},"choices":'
        self.tail = ',"usage":null}\n\n' if include_usage else "}\n\n"
        self._include_usage = include_usage
        self._unfinished = choices
        self._usages: list[dict[str, int]] = []

    def closing(self, usage: dict[str, int]) -> str:
        """What comes after the end of a choice: after the last one usage, if asked for, and [DONE].

        Args:
            usage: The choice's own.
        """
        self._usages.append(usage)
        self._unfinished -= 1
        if self._unfinished:
            return ""
        if not self._include_usage:
            return sse.DONE
        total = to_json(sum_usage(self._usages)).decode()
        return f'{self.head}[],"usage":{total}}}\n\n{sse.DONE}'


class ChatChoice:
    """The frames of one choice: constant text around each escaped delta.

    Args:
        chunks: What all choices share.
        index: Which of them it is.
        sampling: What its task was asked; it may record log probabilities for itself alone.
    """

    ping = sse.OPENAI_PING
    resumable = False

    def __init__(self, chunks: ChatChunks, index: int, sampling: SamplingParams) -> None:
        self._chunks = chunks
        self._detailed = sampling.records_logprobs
        self._tells_logprobs = sampling.logprobs is not None
        self._choice = f'{chunks.head}[{{"index":{index},"delta":{{'
        self._delta = f'{self._choice}"content":'
        self._delta_tail = f'}},"logprobs":null,"finish_reason":null}}]{chunks.tail}'

    def opening(self) -> str:
        """The first chunk: who speaks."""
        return f'{self._choice}"role":"assistant","content":""{self._delta_tail}'

    def frames(self, events: Sequence[Event]) -> str:
        """The frames of token events; one without text and log probabilities has none."""
        if self._detailed:
            return "".join(map(self._detailed_frame, events))
        delta, tail = self._delta, self._delta_tail
        return "".join(
            [
                f"{delta}{event.data}{tail}"
                for event in events
                if event.kind == TOKEN and event.data != '""'
            ]
        )

    def _detailed_frame(self, event: Event) -> str:
        logprobs = event.logprobs_data if self._tells_logprobs else "[]"
        if logprobs == "[]":  # held-back text, or a token of a stop string
            text = event.text_data
            return "" if text == '""' else f"{self._delta}{text}{self._delta_tail}"
        tail = f'"finish_reason":null}}]{self._chunks.tail}'
        told = f'{{"content":{logprobs},"refusal":null}}'
        return f'{self._delta}{event.text_data}}},"logprobs":{told},{tail}'

    def ending(self, event: Event) -> str:
        """The frames after the last token: nothing is called finished that is not."""
        if event.kind != TaskState.COMPLETED:
            return sse.data_frame(unfinished(event))
        body = event.body
        reason = finish_reason_of(body["finish_reason"])
        end = f'}},"logprobs":null,"finish_reason":"{reason}"}}]{self._chunks.tail}'
        return f"{self._choice}{end}{self._chunks.closing(body['usage'])}"

    def trouble(self, error: dict[str, Any]) -> str:
        """An error object in place of the rest."""
        return sse.data_frame(error)

    def farewell(self, error: dict[str, Any]) -> str:
        """The same: no client of this form comes back."""
        return self.trouble(error)
