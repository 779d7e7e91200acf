"""The fleet from outside, as the terminal's commands use it: HTTP, and answers that survive."""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from millstream.fleet.frames import MalformedStream, read_frames
from millstream.fleet.state_folder import running_url
from millstream.shared.errors import MillstreamError
from millstream.shared.listener import url_of
from millstream.shared.settings import Settings

TERMINAL = ("completed", "cancelled", "failed")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
# A stream has a comment every KEEPALIVE_S, 10 by default: longer silence is a dead connection.
_SILENCE_S = 35.0
_CONNECT_S = 5.0
_ANSWER_S = 30.0


class Refusal(MillstreamError):
    """The fleet answered with an error; `status` is HTTP's, `code` OpenAI's."""

    def __init__(
        self, message: str, *, status: int, code: str | None = None, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message, code=code)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def passing(self) -> bool:
        """Whether the same request may do better later."""
        return self.status in (408, 429) or self.status >= 500


class Unreachable(MillstreamError):
    """Nobody answers at the address."""


class FleetClient:
    """Calls to a pod.

    Args:
        http: With the pod's address as its base.
        on_trouble: Told in a few words what is waited for, and '' when that is over.
    """

    def __init__(self, http: httpx2.AsyncClient, on_trouble: Callable[[str], None]) -> None:
        self._http = http
        self._on_trouble = on_trouble
        self.refused = False
        """Whether what is being submitted was refused: there is no task before the next try."""

    async def get(self, path: str) -> Any:
        """The JSON at a path.

        Raises:
            Refusal: the fleet would not.
            Unreachable: it did not answer.
        """
        return (await self._answer("GET", path)).json()

    async def submit(self, body: dict[str, Any]) -> str:
        """Start a task, once, however often that has to be asked; its id.

        Raises:
            Refusal: for good.
        """
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        pause = _FIRST_PAUSE_S
        while True:
            try:
                answer = await self._answer("POST", "/tasks", json=body, headers=headers)
            except (Refusal, Unreachable) as error:
                # What a store that does not answer was sent may come of it all the same.
                self.refused = isinstance(error, Refusal) and error.code != "redis_unavailable"
                pause = await self._wait(error, pause)
                self.refused = False
            else:
                self._on_trouble("")
                return answer.json()["task_id"]

    async def stop(self, task_id: str) -> None:
        """End a task.

        Raises:
            Refusal: it is not there any more.
        """
        pause = _FIRST_PAUSE_S
        while True:
            try:
                await self._answer("POST", f"/tasks/{task_id}/stop")
            except (Refusal, Unreachable) as error:
                pause = await self._wait(error, pause)
            else:
                return

    async def follow(self, task_id: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """The task's events, (kind, data), each once and in order, over any number of connections.

        `queued` hints are among them; a terminal event comes last.

        Raises:
            Refusal: the rest cannot be had any more.
        """
        after = "0"
        pause = _FIRST_PAUSE_S
        while True:
            try:
                async for event_id, kind, data in self._connection(task_id, after):
                    self._on_trouble("")
                    pause = _FIRST_PAUSE_S
                    after = event_id or after
                    yield kind, data
                    if kind in TERMINAL:
                        return
            except (Refusal, Unreachable) as error:
                pause = await self._wait(error, pause)
            else:  # a pod that goes away ends its streams
                await asyncio.sleep(_FIRST_PAUSE_S)

    async def _connection(
        self, task_id: str, after: str
    ) -> AsyncIterator[tuple[str | None, str, dict[str, Any]]]:
        try:
            async with self._http.stream(
                "GET",
                f"/tasks/{task_id}/stream",
                headers={"Last-Event-ID": after},
                timeout=httpx2.Timeout(_SILENCE_S, connect=_CONNECT_S),
            ) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    raise _refusal(answer)
                async for frame in read_frames(answer.aiter_raw()):
                    if frame.data is not None and frame.event != "error":
                        yield frame.id, frame.event, json.loads(frame.data)
        except (httpx2.TransportError, MalformedStream) as error:
            raise Unreachable(str(error) or type(error).__name__) from error

    async def _wait(self, error: Refusal | Unreachable, pause: float) -> float:
        """Wait before the next try; how long to wait after that."""
        if isinstance(error, Unreachable):
            self._on_trouble("The fleet cannot be reached; trying again")
            await asyncio.sleep(pause)
        elif error.passing:
            seconds = max(pause, error.retry_after_s)
            self._on_trouble(f"{error.message} Trying again in {seconds:.0f} s")
            await asyncio.sleep(seconds)
        else:
            raise error
        return min(2 * pause, _LONGEST_PAUSE_S)

    async def _answer(self, method: str, path: str, **request: Any) -> httpx2.Response:
        try:
            answer = await self._http.request(method, path, **request)
        except httpx2.TransportError as error:
            detail = str(error) or type(error).__name__
            raise Unreachable(
                f"nobody answers at {self._http.base_url}: {detail}; `millstream up` starts a "
                "fleet, --url or MILLSTREAM_URL say where another one is"
            ) from error
        if not answer.is_success:
            raise _refusal(answer)
        return answer


def _refusal(answer: httpx2.Response) -> Refusal:
    code = None
    try:
        message, code = answer.json()["error"]["message"], answer.json()["error"]["code"]
    except (ValueError, KeyError, TypeError):
        message = f"{answer.url} answered {answer.status_code}."
    if answer.status_code == 401:  # the fleet's words are for who writes headers
        message = f"{message} A command takes the key from MILLSTREAM_API_KEY."
    wait = answer.headers.get("retry-after", "")
    return Refusal(
        str(message),
        status=answer.status_code,
        code=code,
        retry_after_s=float(wait) if wait.isdigit() else 0.0,
    )


@asynccontextmanager
async def open_client(
    settings: Settings, on_trouble: Callable[[str], None] = lambda _: None
) -> AsyncGenerator[FleetClient]:
    """A client of the fleet that the settings name."""
    key = settings.api_key.get_secret_value()
    async with httpx2.AsyncClient(
        base_url=fleet_url(settings),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S),
        trust_env=False,
    ) as http:
        yield FleetClient(http, on_trouble)


def fleet_url(settings: Settings) -> str:
    """Where the fleet is: `URL`, or the API of these settings, or this user's `millstream up`."""
    if settings.url:
        return settings.url.rstrip("/")
    here = None if settings.model_fields_set & {"host", "port"} else running_url()
    return here or url_of(settings.host, settings.port)
