"""`/tasks/{id}/ws` and `/v1/chat/ws`: the native events for networks that break SSE."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, WebSocket
from starlette.websockets import WebSocketDisconnect

from millstream.api.auth.dependencies import CurrentCaller, TaskReader
from millstream.api.body import BODY_S, parse_body
from millstream.api.openai import mapping
from millstream.api.openai.schemas import ChatCompletionRequest
from millstream.api.pod import CurrentPod
from millstream.api.routes.slots import ReaderSlot, StreamSlot
from millstream.api.routes.tasks import event_number
from millstream.api.sockets import ENDED, GOING, TaskSocket
from millstream.shared.errors import InvalidRequest

router = APIRouter()


@router.websocket("/tasks/{task_id}/ws")
async def follow_task(
    websocket: WebSocket,
    task_id: str,
    pod: CurrentPod,
    caller: TaskReader,
    slot: ReaderSlot,
    *,
    last_event_id: Annotated[str | None, Query()] = None,
) -> None:
    """A task's events after the one the client has, and then as they come."""
    after = event_number(last_event_id or "0")
    try:
        await slot.take()
        await websocket.accept()
        socket = TaskSocket(websocket, pod, caller.id)
        ended = await socket.follow(task_id, after=after)
        await websocket.close(ENDED if ended else GOING)
    except WebSocketDisconnect:
        return
    finally:
        slot.give_back()


@router.websocket("/v1/chat/ws")
async def chat(
    websocket: WebSocket, pod: CurrentPod, caller: CurrentCaller, slot: StreamSlot
) -> None:
    """The events of the answer to the first message, which is the body of a chat."""
    await websocket.accept()
    socket = TaskSocket(websocket, pod, caller.id)
    accepted, ended = None, False
    try:
        try:
            async with asyncio.timeout(BODY_S):
                raw = (await socket.receive()).encode()
        except TimeoutError:
            raise InvalidRequest(
                f"The request did not come within {BODY_S:g} s.", code="body_timeout"
            ) from None
        most = pod.settings.max_prompt_chars
        body = parse_body(raw, ChatCompletionRequest, max_prompt_chars=most)
        if body.n not in (None, 1):
            raise InvalidRequest("A WebSocket carries one choice.", param="n")
        await slot.take()
        accepted = await pod.admission.submit(
            *mapping.chat_tasks(body),
            caller=caller,
            attached=True,
            priority=mapping.priority_of(body.service_tier),
        )
        await socket.send("task", {"task_id": accepted.task_id, "model": accepted.model})
        ended = await socket.follow(accepted.task_id, after=0)
        await websocket.close(ENDED if ended else GOING)
    except WebSocketDisconnect:
        return
    finally:
        slot.give_back()
        if accepted is not None and not ended:
            pod.left(accepted, caller.id, for_now=True)
