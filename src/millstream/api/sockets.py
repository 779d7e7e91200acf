"""The events of a task on a WebSocket: JSON frames out, stops and resumes in."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

from pydantic import Field, RootModel
from starlette.websockets import WebSocket, WebSocketDisconnect

from millstream.api import sse
from millstream.api.body import parse_body
from millstream.api.http import CUT
from millstream.api.openai.schemas import Body
from millstream.api.pod import Pod
from millstream.api.silence import Silence
from millstream.api.streams import HINT_S, QueuePlace, news_of
from millstream.shared.cancellation import cancel_until_done
from millstream.shared.errors import InvalidRequest
from millstream.shared.events import Event
from millstream.shared.schemas import to_json
from millstream.shared.states import TaskState

logger = logging.getLogger(__name__)

ENDED = 1000
GOING = 1012
"""This pod goes (RFC 6455's registry: service restart); another one has the same log."""


class StopMessage(Body):
    """End the task."""

    type: Literal["stop"]


class ResumeMessage(Body):
    """Begin anew after an event."""

    type: Literal["resume"]
    last_event_id: int = Field(ge=0, lt=10**15)


class ClientMessage(RootModel[StopMessage | ResumeMessage]):
    """What a reader may say."""

    root: Annotated[StopMessage | ResumeMessage, Field(discriminator="type")]


class TaskSocket:
    """One WebSocket that follows one task.

    Raises:
        WebSocketDisconnect: by all methods, when the client is gone.
    """

    def __init__(self, websocket: WebSocket, pod: Pod, caller: str) -> None:
        self._websocket = websocket
        self._pod = pod
        self._caller = caller

    async def follow(self, task_id: str, *, after: int) -> bool:
        """Tell of a task's events after a number until the end; whether that has come.

        Raises:
            MillstreamError: as `Relay.events`, or a message is none of ours.
        """
        while True:
            telling = asyncio.create_task(self._tell(task_id, after))
            listening = asyncio.create_task(self._listen(task_id))
            both = (telling, listening)
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if telling.done():
                    return telling.result()
                after = listening.result()
            finally:
                await cancel_until_done(both)  # a call to Redis may swallow a cancellation
                for task in both:
                    _ = task.cancelled() or task.exception()  # of which one is told
            await self.send("resumed", {"last_event_id": after})

    async def _tell(self, task_id: str, after: int) -> bool:
        page = await self._pod.relay.resumable(task_id, self._caller, after=after)
        if page is None:
            return True
        news = news_of(
            self._pod,
            task_id,
            self._caller,
            after=after,
            model=page.model,
            queued=page.state == TaskState.QUEUED,
            silence=Silence(self._pod.settings.keepalive_s, HINT_S),
        )
        return await self._pass_on(news)

    async def _pass_on(self, news: AsyncGenerator[list[Event] | QueuePlace]) -> bool:
        async with aclosing(news):
            async for told in news:
                if isinstance(told, tuple):
                    position, eta_s = told
                    eta_s = eta_s if eta_s is None else round(eta_s, 1)
                    await self.send("queued", {"position": position, "eta_s": eta_s})
                    continue
                for event in told:
                    await self._send(_frame(event))
                    if event.terminal:
                        return True
        return False

    async def _listen(self, task_id: str) -> int:
        """Do what the client says, until it wants other events; after which number."""
        while True:
            raw, most = (await self.receive()).encode(), self._pod.settings.max_prompt_chars
            match parse_body(raw, ClientMessage, max_prompt_chars=most).root:
                case StopMessage():
                    await self._pod.stop(task_id, self._caller)
                case ResumeMessage(last_event_id=after):
                    return after

    async def receive(self) -> str:
        """The client's next message."""
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        if message.get("text") is None:
            raise InvalidRequest("Messages must be text.", code="invalid_json")
        return message["text"]

    async def send(self, event: str, data: object) -> None:
        """Send a frame that is no event of the log."""
        await self._send(to_json({"event": event, "data": data}).decode())

    async def _send(self, text: str) -> None:
        """As on all streams: who takes nothing for SEND_TIMEOUT_S is cut, and can resume."""
        try:
            async with asyncio.timeout(self._pod.settings.send_timeout_s):
                await self._websocket.send_text(text)
        except TimeoutError:
            logger.info("cut a WebSocket that took nothing")
            self._websocket.scope["extensions"][CUT]["now"]()
            raise WebSocketDisconnect(1006) from None
        except RuntimeError:  # it went while the other half of us was waiting
            raise WebSocketDisconnect(1006) from None


def _frame(event: Event) -> str:
    """An event, with its number as the id to resume from."""
    name, data = sse.native_name(event), sse.native_data(event)
    return f'{{"id": {event.seq}, "event": "{name}", "data": {data}}}'
