"""Pure mappings between OpenAI's wire format and the protocol."""

from collections.abc import Sequence
from typing import Any

from millstream.api.errors import unfinished
from millstream.api.openai.schemas import ChatCompletionRequest, ChatMessage, Sampling
from millstream.api.sse import DONE, OPENAI_PING, data_frame
from millstream.shared.events import TOKEN, Event
from millstream.shared.schemas import Message, SamplingParams, to_json
from millstream.shared.states import TaskState

_ROLES = {"developer": "system"}


def messages_of(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """The conversation; OpenAI's newer word for the system is the old one to every template."""
    return tuple(
        Message(_ROLES.get(message.role, message.role), message.text) for message in messages
    )


def sampling_of(body: Sampling, max_tokens: int | None) -> SamplingParams:
    """The sampling settings, with OpenAI's defaults where the caller gave none."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_p=1.0 if body.top_p is None else float(body.top_p),
        top_k=max(body.top_k or 0, 0),
        seed=body.seed,
        stop=stop,
    )


def chat_max_tokens(body: ChatCompletionRequest) -> int | None:
    """The bound on the answer; the newer name wins."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def completion_id(task_id: str) -> str:
    """The chunk id, which holds the task id."""
    return f"chatcmpl-{task_id}"


def chat_completion(
    task_id: str, *, model: str, created: int, text: str, body: dict[str, Any]
) -> dict[str, Any]:
    """The whole answer; `body` is that of the completed event."""
    return {
        "id": completion_id(task_id),
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": body["finish_reason"],
            }
        ],
        "usage": body["usage"],
    }


class ChatChunks:
    """The frames of one streamed answer: constant text around each escaped delta."""

    ping = OPENAI_PING

    def __init__(self, task_id: str, *, model: str, created: int, include_usage: bool) -> None:
        head = to_json(
            {
                "id": completion_id(task_id),
                "object": "chat.completion.chunk",
                "created": created,
                "model": model,
            }
        ).decode()[:-1]
        self._head = f'data: {head},"choices":'
        self._tail = ',"usage":null}\n\n' if include_usage else "}\n\n"
        self._delta = f'{self._head}[{{"index":0,"delta":{{"content":'
        self._delta_tail = f'}},"logprobs":null,"finish_reason":null}}]{self._tail}'
        self._include_usage = include_usage

    def opening(self) -> str:
        """The first chunk: who speaks."""
        return (
            f'{self._head}[{{"index":0,"delta":{{"role":"assistant","content":""}},'
            f'"logprobs":null,"finish_reason":null}}]{self._tail}'
        )

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
            return data_frame(unfinished(event))
        body = event.body
        frames = (
            f'{self._head}[{{"index":0,"delta":{{}},"logprobs":null,'
            f'"finish_reason":"{body["finish_reason"]}"}}]{self._tail}'
        )
        if self._include_usage:
            frames += f'{self._head}[],"usage":{to_json(body["usage"]).decode()}}}\n\n'
        return frames + DONE
