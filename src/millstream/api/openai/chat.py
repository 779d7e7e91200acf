"""A chat answer as OpenAI writes it: the whole object, or its chunks."""

from collections.abc import Sequence
from typing import Any

from millstream.api import sse
from millstream.api.choices import Told
from millstream.api.errors import unfinished
from millstream.api.openai.usage import sum_usage
from millstream.shared.events import TOKEN, Event
from millstream.shared.schemas import to_json
from millstream.shared.states import TaskState


def completion_id(task_id: str) -> str:
    """The id of an answer, which holds that of its first task."""
    return f"chatcmpl-{task_id}"


def chat_completion(
    task_id: str, *, model: str, created: int, choices: Sequence[Told]
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
                "logprobs": None,
                "finish_reason": body["finish_reason"],
            }
            for index, (choice, body) in enumerate(zip(choices, bodies, strict=True))
        ],
        "usage": sum_usage([body["usage"] for body in bodies]),
    }


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
    """The frames of one choice: constant text around each escaped delta."""

    ping = sse.OPENAI_PING
    resumable = False

    def __init__(self, chunks: ChatChunks, index: int) -> None:
        self._chunks = chunks
        self._choice = f'{chunks.head}[{{"index":{index},"delta":{{'
        self._delta = f'{self._choice}"content":'
        self._delta_tail = f'}},"logprobs":null,"finish_reason":null}}]{chunks.tail}'

    def opening(self) -> str:
        """The first chunk: who speaks."""
        return f'{self._choice}"role":"assistant","content":""{self._delta_tail}'

    def frames(self, events: Sequence[Event]) -> str:
        """The frames of token events; one without text has none."""
        return "".join(
            f"{self._delta}{event.data}{self._delta_tail}"
            for event in events
            if event.kind == TOKEN and event.data != '""'
        )

    def ending(self, event: Event) -> str:
        """The frames after the last token: nothing is called finished that is not."""
        if event.kind != TaskState.COMPLETED:
            return sse.data_frame(unfinished(event))
        body = event.body
        end = f'}},"logprobs":null,"finish_reason":"{body["finish_reason"]}"}}]{self._chunks.tail}'
        return f"{self._choice}{end}{self._chunks.closing(body['usage'])}"

    def trouble(self, error: dict[str, Any]) -> str:
        """An error object in place of the rest."""
        return sse.data_frame(error)

    def farewell(self, error: dict[str, Any]) -> str:
        """The same: no client of this form comes back."""
        return self.trouble(error)
