"""The response object of `/v1/responses`: a pure function of a task and its log."""

import re
from typing import Any

from millstream.shared.events import Event
from millstream.shared.schemas import ResponseOptions, TaskRequest
from millstream.shared.states import FinishReason, TaskState

_PREFIX = "resp_"
_ITEM = re.compile(r"msg_(?P<task>[^_]+)(_(?P<number>[0-9]{1,6}))?", re.ASCII)
_INCOMPLETE = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.CONTENT_FILTER: "content_filter",
}


def response_id(task_id: str) -> str:
    """The response's id, which holds the task's."""
    return _PREFIX + task_id


def task_id_of(given: str) -> str:
    """The task's id in a response's; empty if it is none."""
    return given[len(_PREFIX) :] if given.startswith(_PREFIX) else ""


def output_id(task_id: str) -> str:
    """The id of the message that a task writes."""
    return f"msg_{task_id}"


def input_id(task_id: str, number: int) -> str:
    """The id of a message that a task answers."""
    return f"{output_id(task_id)}_{number}"


def parse_item_id(given: str) -> tuple[str, int | None]:
    """Whose item an id names, and which message of the input; None: the output.

    The task's id is empty if it is the id of none.
    """
    found = _ITEM.fullmatch(given)
    if found is None:
        return "", None
    return found["task"], None if found["number"] is None else int(found["number"])


def text_part(text: str) -> dict[str, Any]:
    """A part of an answer's content."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def output_message(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    """An answer, or what there is of one."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def status_of(request: TaskRequest, state: TaskState, last: Event | None) -> str:
    """How a response stands, in OpenAI's words."""
    match state:
        case TaskState.COMPLETED:
            return "incomplete" if _cut_by(last) else "completed"
        case TaskState.CANCELLED | TaskState.FAILED:
            return state.value
        case TaskState.QUEUED if request.response is not None and request.response.background:
            return "queued"
        case _:
            return "in_progress"


def _cut_by(last: Event | None) -> str | None:
    """Why a completed text is not whole."""
    return None if last is None else _INCOMPLETE.get(last.body.get("finish_reason", ""))


def response_object(
    task_id: str,
    request: TaskRequest,
    *,
    state: TaskState,
    text: str = "",
    last: Event | None = None,
) -> dict[str, Any]:
    """The response as it stands.

    Args:
        task_id: Of the task behind it.
        request: What was asked for.
        state: How the task stands.
        text: What it has written so far.
        last: Its terminal event, once there is one.
    """
    options = request.response or ResponseOptions(created_at=0)
    body = {} if last is None else last.body
    status = status_of(request, state, last)
    written = bool(text) or state == TaskState.COMPLETED
    cut_by = _cut_by(last) if state == TaskState.COMPLETED else None
    return {
        "id": response_id(task_id),
        "object": "response",
        "created_at": options.created_at,
        "status": status,
        "background": options.background,
        "error": _error(body["error"]) if "error" in body else None,
        "incomplete_details": {"reason": cut_by} if cut_by else None,
        "instructions": request.messages[0].content if options.instructed else None,
        "max_output_tokens": request.sampling.max_tokens,
        "max_tool_calls": None,
        "metadata": options.metadata,
        "model": request.model,
        "output": _output(task_id, status, text) if written else [],
        "parallel_tool_calls": options.parallel_tool_calls,
        "previous_response_id": options.previous_response_id,
        "prompt_cache_key": options.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": options.safety_identifier,
        "service_tier": options.service_tier,
        "store": options.store,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": _usage(body["usage"]) if "usage" in body else None,
        "user": options.user,
    }


def _output(task_id: str, status: str, text: str) -> list[dict[str, Any]]:
    whole = status if status in ("in_progress", "completed") else "incomplete"
    return [output_message(output_id(task_id), whole, [text_part(text)])]


def _usage(usage: dict[str, int]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _error(error: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's list of codes is closed, and clients check it: ours goes into the message."""
    at_fault = error.get("type") == "invalid_request_error"
    code = "invalid_prompt" if at_fault else "server_error"
    return {
        "code": code,
        "message": f"{error.get('message')} ({error.get('code')})",
    }
