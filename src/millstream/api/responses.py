"""Stored responses: what `/v1/responses` made, and can be asked for again by its id."""

from collections.abc import Mapping
from typing import Any

import msgspec

from millstream.api.openai.response_object import (
    parse_item_id,
    response_id,
    response_object,
    task_id_of,
)
from millstream.api.openai.response_request import conversation
from millstream.api.pod import Pod
from millstream.api.relay import unavailable
from millstream.shared.connection import RedisError
from millstream.shared.errors import ExpiredTask, InvalidRequest, UnknownTask
from millstream.shared.keys import Keys
from millstream.shared.schemas import (
    Message,
    ResponseOptions,
    TaskRequest,
    decode_request,
    shard_of,
)
from millstream.shared.states import TaskState


class StoredResponse(msgspec.Struct, frozen=True):
    """A response that its caller may ask for again."""

    task_id: str
    request: TaskRequest
    options: ResponseOptions


async def find(pod: Pod, given: str, caller: str) -> StoredResponse:
    """The response of an id.

    Raises:
        UnknownTask: there is none that is stored and this caller's; or there was one.
        RedisUnavailable: Redis did not answer.
    """
    task_id = task_id_of(given)
    try:
        request = await request_of(pod, task_id, caller)
    except (UnknownTask, ExpiredTask):
        raise _unknown(given) from None
    if request.response is None or not request.response.store:
        raise _unknown(given)
    return StoredResponse(task_id, request, request.response)


async def request_of(pod: Pod, task_id: str, caller: str) -> TaskRequest:
    """What a task was asked for; raises as `Relay.page`."""
    await pod.relay.page(task_id, caller, after=0, count=0)  # says whose it is
    try:
        raw = await pod.scripts.request_of(Keys(shard_of(task_id) or 0), task_id)
    except RedisError as error:
        raise unavailable(error) from error
    if raw is None:  # deleted since
        raise UnknownTask(f"There is no task {task_id}.", param="task_id")
    return decode_request(raw)


async def as_it_stands(pod: Pod, task_id: str, request: TaskRequest, caller: str) -> dict[str, Any]:
    """The response object now, with the text so far; raises as `find`."""
    try:
        log = await pod.relay.so_far(task_id, caller)
    except (UnknownTask, ExpiredTask):
        raise _unknown(response_id(task_id)) from None
    return response_object(task_id, request, state=log.state, text=log.text, last=log.last)


async def turns_before(pod: Pod, given: str, caller: str) -> tuple[Message, ...]:
    """The conversation up to and with an earlier response, which goes on from there.

    Raises:
        InvalidRequest: there is no such response, or it has no answer, or none yet.
        RedisUnavailable: Redis did not answer.
    """
    param = "previous_response_id"
    try:
        stored = await find(pod, given, caller)
        log = await pod.relay.so_far(stored.task_id, caller)
    except (UnknownTask, ExpiredTask):
        raise InvalidRequest(
            f"There is no response {given[:64]!r}.", param=param, code="previous_response_not_found"
        ) from None
    if log.state != TaskState.COMPLETED:
        raise InvalidRequest(
            f"The response {given} cannot be gone on from: it is {log.state}.", param=param
        )
    return (*conversation(stored.request), Message("assistant", log.text))


async def items(pod: Pod, named: Mapping[str, str], caller: str) -> dict[str, Message]:
    """What items of stored responses say.

    Args:
        pod: Where they are asked for.
        named: Their ids, and the parameter that each is named by.
        caller: Whose they must be.

    Raises:
        InvalidRequest: there is no such item, it is not written yet, or all are too long.
        RedisUnavailable: Redis did not answer.
    """
    found: dict[str, Message] = {}
    room = pod.settings.max_prompt_chars
    for item_id, param in named.items():
        found[item_id] = await _item(pod, item_id, caller, param)
        room -= len(found[item_id].content)
        if room < 0:  # before all the others are read
            raise InvalidRequest(
                f"The input has more than {pod.settings.max_prompt_chars} characters.",
                param="input",
                code="prompt_too_long",
            )
    return found


async def _item(pod: Pod, item_id: str, caller: str, param: str) -> Message:
    missing = InvalidRequest(
        f"There is no item {item_id[:64]!r}; those of responses with store: false are not kept.",
        param=param,
    )
    task_id, number = parse_item_id(item_id)
    try:
        stored = await find(pod, response_id(task_id), caller)
        if number is not None:
            turns = conversation(stored.request)
            if number >= len(turns):
                raise missing
            return turns[number]
        log = await pod.relay.so_far(stored.task_id, caller)
    except (UnknownTask, ExpiredTask):
        raise missing from None
    if log.state != TaskState.COMPLETED:
        raise InvalidRequest(f"The item {item_id} is not whole: it is {log.state}.", param=param)
    return Message("assistant", log.text)


async def delete(pod: Pod, stored: StoredResponse, caller: str) -> None:
    """End and forget a response.

    Raises:
        RedisUnavailable: Redis did not answer, so it is not certain.
    """
    try:
        await pod.scripts.delete(
            Keys(shard_of(stored.task_id) or 0),
            task_id=stored.task_id,
            caller=caller,
            result_ttl_s=pod.settings.result_ttl_s,
        )
    except RedisError as error:
        raise unavailable(error) from error
    pod.shown.note_delete(stored.task_id, caller)


def _unknown(given: str) -> UnknownTask:
    return UnknownTask(
        f"There is no response {given[:64]!r}.", param="response_id", code="response_not_found"
    )
