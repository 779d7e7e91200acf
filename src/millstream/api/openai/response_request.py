"""From the body of `POST /v1/responses` to the task behind it, and from that to its input items."""

from collections.abc import Mapping
from typing import Any

from millstream.api.openai.mapping import role_of
from millstream.api.openai.response_object import input_id, output_message, text_part
from millstream.api.openai.response_schemas import InputItemsQuery, ItemReference, ResponseRequest
from millstream.api.openai.schemas import MAX_MESSAGES
from millstream.shared.errors import InvalidRequest
from millstream.shared.schemas import Message, ResponseOptions, TaskRequest

MAX_REFERENCES = 256  # each is a log to read


def options_of(body: ResponseRequest, created_at: int) -> ResponseOptions:
    """What is kept of a body to be said again."""
    return ResponseOptions(
        created_at=created_at,
        background=bool(body.background),
        store=body.store is not False,
        instructed=body.instructions is not None,
        previous_response_id=body.previous_response_id,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        service_tier="flex" if body.service_tier == "flex" else "default",
        user=body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
    )


def references_of(body: ResponseRequest) -> dict[str, str]:
    """The items that the input names instead of saying them: their ids, and where they are named.

    Raises:
        InvalidRequest: there are too many.
    """
    named: dict[str, str] = {}
    if not isinstance(body.input, str):
        for number, item in enumerate(body.input):
            if isinstance(item, ItemReference):
                named.setdefault(item.id, f"input[{number}].id")
    if len(named) > MAX_REFERENCES:
        raise InvalidRequest(
            f"The input refers to {len(named)} items; {MAX_REFERENCES} are the most.", param="input"
        )
    return named


def messages_of(
    body: ResponseRequest, earlier: tuple[Message, ...], items: Mapping[str, Message]
) -> tuple[Message, ...]:
    """The instructions, the conversation so far, and what is new.

    Args:
        body: What the caller sent.
        earlier: The conversation that it goes on with.
        items: What its references stand for.

    Raises:
        InvalidRequest: together they are too many.
    """
    messages = list(earlier)
    if body.instructions is not None:
        messages.insert(0, Message("system", body.instructions))
    if isinstance(body.input, str):
        messages.append(Message("user", body.input))
    else:
        messages += [
            items[item.id]
            if isinstance(item, ItemReference)
            else Message(role_of(item.role), item.text)
            for item in body.input
        ]
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(
            f"The conversation has {len(messages)} messages; {MAX_MESSAGES} are the most.",
            param="input",
        )
    return tuple(messages)


def conversation(request: TaskRequest) -> tuple[Message, ...]:
    """All that a response answers but the instructions, which no later one inherits."""
    instructed = request.response is not None and request.response.instructed
    return request.messages[1:] if instructed else request.messages


def items_page(task_id: str, request: TaskRequest, query: InputItemsQuery) -> dict[str, Any]:
    """A piece of the list of that conversation's items.

    Raises:
        InvalidRequest: the query begins after an item that is none of them.
    """
    items = [
        _item(input_id(task_id, number), message)
        for number, message in enumerate(conversation(request))
    ]
    if query.order == "desc":
        items.reverse()
    start = 0
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise InvalidRequest(f"There is no item {query.after!r} here.", param="after")
        start = ids.index(query.after) + 1
    page = items[start : start + query.limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + len(page) < len(items),
    }


def _item(item_id: str, message: Message) -> dict[str, Any]:
    if message.role == "assistant":
        return output_message(item_id, "completed", [text_part(message.content)])
    return {
        "id": item_id,
        "type": "message",
        "role": message.role,
        "status": "completed",
        "content": [{"type": "input_text", "text": message.content}],
    }
