"""One client: asks, reads, comes back on another pod, and writes down what it saw."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import httpx2
import openai

from millstream.fleet.chaos.history import Connection, Form, History, Look, Seen, Stopped
from millstream.fleet.chaos.response_stream import AHEAD, read_response, response_body
from millstream.fleet.frames import MalformedStream, read_frames

MODEL = "fake"
SILENCE_S = 20.0
"""No stream is silent for longer, since keepalives come every second; it is a hang."""
PATIENCE_S = 60.0
"""No answer in one piece takes longer: the longest text needs 4 s, and a takeover a lease."""

_PAUSE_S = 0.1
_TERMINAL = ("completed", "cancelled", "failed")
_CUT = (httpx2.TransportError, openai.APIConnectionError, TimeoutError)


class Client:
    """Asks any of the pods, as a balancer would choose them."""

    def __init__(
        self,
        urls: Sequence[str],
        http: httpx2.AsyncClient,
        generator: random.Random,
        *,
        stopping: asyncio.Event,
    ) -> None:
        self._urls = urls
        self._http = http
        self._generator = generator
        self._stopping = stopping
        """Past this, what cannot be done is given up."""
        self._openai = [
            openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http
            )
            for url in urls
        ]

    async def run(self, history: History) -> None:
        """Get the whole answer, whatever happens on the way."""
        try:
            if history.form.lasting:
                await self._run_task(history)
            else:
                await self._run_chat(history)
                if history.key is not None and history.ended:
                    history.ended = False
                    await self._run_chat(history)  # again, for the same answer
        except MalformedStream as error:
            history.troubles.append(f"malformed stream: {error}")

    async def stop(self, history: History) -> None:
        """Stop its task: again until answered, and once more, for that must change nothing."""
        history.stop_sent = True
        for _ in range(2):
            while (answer := await self._send("POST", history, "/stop")) is None:
                if self._stopping.is_set():
                    return
                await self._pause()
            if answer.status_code != 200:
                history.troubles.append(f"stop answered {answer.status_code}: {answer.text[:200]}")
                return
            body = answer.json()
            history.stops.append(Stopped(body["task_id"], body["status"], body["usage"]))

    # Native tasks and background responses.

    async def _run_task(self, history: History) -> None:
        if not await self._submit(history):
            return
        if history.key is not None and not await self._submit(history):  # again: the same task
            return
        if history.form == Form.POLL:
            await self._poll(history)
        while history.form.numbered and not history.ended and not history.troubles:
            await self._read(history)

    async def _submit(self, history: History) -> bool:
        """Send the task until it is accepted; False if its fate is unknown."""
        path, accepted = "/tasks", 202
        body = {"model": MODEL, "prompt": history.prompt.text, **history.prompt.sampling}
        if history.form == Form.RESPONSE:
            path, accepted = "/v1/responses", 200
            body = {"model": MODEL, **response_body(history.prompt)}
        headers = {} if history.key is None else {"Idempotency-Key": history.key}
        while True:
            history.posts += 1
            try:
                answer = await self._http.post(
                    f"{self._any_url()}{path}", json=body, headers=headers, timeout=SILENCE_S
                )
            except httpx2.ReadTimeout:
                history.troubles.append("a POST was not answered")
                return False
            except httpx2.TransportError:
                if history.key is None:
                    history.retried["answer lost"] += 1
                    return False  # whether there is a task nobody can say
                await self._pause()
                continue
            if answer.status_code == accepted:
                history.task_ids.append(answer.headers["x-task-id"])
                return True
            if not self._again(history, answer):
                return False
            await self._pause()

    async def _read(self, history: History) -> None:
        """Read the stream until it ends or breaks."""
        connection = history.connect()
        read = _read_native
        url = f"{self._any_url()}/tasks/{history.task_id}/stream"
        headers = {"Last-Event-ID": str(connection.after)} if connection.after else {}
        if history.form == Form.RESPONSE:
            read, headers = read_response, {}
            url = f"{self._any_url()}/v1/responses/resp_{history.task_id}?stream=true"
            if connection.after:
                url += f"&starting_after={connection.after + AHEAD}"
        try:
            with _cuttable(history) as scope:
                async with (
                    scope,
                    self._http.stream("GET", url, headers=headers, timeout=SILENCE_S) as answer,
                ):
                    if answer.status_code == 200:
                        await read(connection, answer)
                        if connection.error not in (None, "server_closing"):
                            history.troubles.append(f"stream ended with {connection.error}")
                    elif answer.status_code == 204:
                        history.troubles.append("204 before the terminal event was seen")
                    else:
                        await answer.aread()
                        self._again(history, answer)
        except httpx2.ReadTimeout:
            history.troubles.append(f"a stream was silent for {SILENCE_S:g} s")
        except _CUT as error:
            history.retried[type(error).__name__] += 1
        history.ended = connection.done  # also where it was cut off right after the last event
        if not history.ended:
            await self._pause()

    async def _poll(self, history: History) -> None:
        while not history.troubles:
            answer = await self._send("GET", history, "")
            if answer is not None and answer.status_code == 200:
                body = answer.json()
                look = Look(body["status"], body["text"], body["usage"], body["finish_reason"])
                history.looks.append(look)
                if look.status in _TERMINAL:
                    history.ended = True
                    return
            elif answer is not None:
                self._again(history, answer)
            await self._pause(0.5)

    async def _send(self, method: str, history: History, path: str) -> httpx2.Response | None:
        """Ask about the task; None where there is no answer, or one that asks for patience."""
        url = f"{self._any_url()}/tasks/{history.task_id}{path}"
        try:
            answer = await self._http.request(method, url, timeout=SILENCE_S)
        except httpx2.TransportError as error:
            if isinstance(error, httpx2.ReadTimeout):
                history.troubles.append(f"{method} {path or 'of the task'} was not answered")
            return None
        return None if answer.status_code == 503 and self._again(history, answer) else answer

    def _again(self, history: History, answer: httpx2.Response) -> bool:
        """Whether an answer asks to be asked again; all others are troubles."""
        retry_after = answer.headers.get("retry-after", "")
        if answer.status_code == 503 and retry_after.isdecimal() and int(retry_after) >= 1:
            history.retried["503"] += 1
            return True
        history.troubles.append(f"{answer.status_code}: {answer.text[:300]}")
        return False

    # Chats.

    async def _run_chat(self, history: History) -> None:
        """Ask until an answer has come; without a key, a task that was made is the only try."""
        while not history.ended and not history.troubles:
            connection = history.connect()
            history.posts += 1
            try:
                with _cuttable(history) as scope:
                    async with scope:
                        await self._chat(history, connection)
                history.ended = connection.done or connection.error in ("cancelled", *_FAILURES)
            except openai.APIStatusError as error:
                self._take_refusal(history, connection, error)
            except openai.APITimeoutError:
                history.troubles.append(f"a chat was silent for {PATIENCE_S:g} s")
            except openai.APIError as error:
                if not isinstance(error, openai.APIConnectionError):
                    connection.error = error.code or "unknown"
                    history.ended = connection.error in ("cancelled", *_FAILURES)
                history.retried[connection.error or "cut"] += 1
            except _CUT as error:
                history.retried[type(error).__name__] += 1
            if history.ended or history.troubles:
                return
            if history.attached:
                history.left = True
                if connection.seen or history.task_ids or connection.error:
                    return  # its task ends with the connection
                if not history.retried["503"]:
                    return
            await self._pause()

    def _take_refusal(
        self, history: History, connection: Connection, error: openai.APIStatusError
    ) -> None:
        connection.error = error.code
        if error.status_code == 503 and error.code != "server_closing":
            self._again(history, _plain(error))
        elif error.status_code != 503:
            history.ended = error.code in ("cancelled", *_FAILURES)
            if not history.ended:
                history.troubles.append(f"{error.status_code}: {error.message[:300]}")

    async def _chat(self, history: History, connection: Connection) -> None:
        messages: Any = [
            {"role": "system", "content": "You are a mill."},
            {"role": "user", "content": history.prompt.text},
        ]
        # Untyped: its overloads cannot be chosen by options that are made up at run time.
        create: Any = self._generator.choice(self._openai).chat.completions.create
        options: dict[str, Any] = {
            "model": MODEL,
            "messages": messages,
            "timeout": PATIENCE_S if history.form == Form.CHAT_WHOLE else SILENCE_S,
            **history.prompt.sampling,
        }
        if history.key is not None:
            options["extra_headers"] = {"Idempotency-Key": history.key}
        if history.form == Form.CHAT_WHOLE:
            answer = await create(**options)
            _note_id(history, connection, answer.id)
            text = answer.choices[0].message.content
            connection.seen.append(Seen(None, "token", text, time.monotonic()))
            connection.finish_reason = answer.choices[0].finish_reason
            connection.usage = _usage(answer.usage)
            connection.done = True
            return
        stream = await create(stream=True, stream_options={"include_usage": True}, **options)
        async with stream:
            async for chunk in stream:
                _note_id(history, connection, chunk.id)
                for choice in chunk.choices:
                    if choice.delta.content:
                        seen = Seen(None, "token", choice.delta.content, time.monotonic())
                        connection.seen.append(seen)
                    connection.finish_reason = choice.finish_reason or connection.finish_reason
                if chunk.usage is not None:
                    connection.usage = _usage(chunk.usage)
        # The client swallows `[DONE]`; the usage is the last thing before it.
        connection.done = connection.usage is not None

    def _any_url(self) -> str:
        return self._generator.choice(self._urls)

    async def _pause(self, seconds: float = _PAUSE_S) -> None:
        await asyncio.sleep(seconds * self._generator.uniform(0.5, 1.5))


_FAILURES = ("max_attempts", "deadline_exceeded", "internal_error")


@contextmanager
def _cuttable(history: History):
    """Let the client be cut off meanwhile."""
    history.scope = asyncio.timeout(None)
    try:
        yield history.scope
    finally:
        history.scope = None


async def _read_native(connection: Connection, answer: httpx2.Response) -> None:
    async for frame in read_frames(answer.aiter_bytes()):
        if frame.data is None or frame.event == "queued":
            continue
        if frame.id is None:
            if frame.event != "error":
                raise MalformedStream(f"an event without a number: {frame}")
            connection.error = json.loads(frame.data)["error"]["code"]
            return
        body = json.loads(frame.data)
        is_token = frame.event == "token"
        data = body["text"] if is_token else frame.data
        connection.seen.append(Seen(int(frame.id), frame.event, data, time.monotonic()))
        if not is_token:
            connection.done = True
            connection.finish_reason = body.get("finish_reason")
            connection.usage = body.get("usage")


def _note_id(history: History, connection: Connection, answer_id: str) -> None:
    task_id = connection.task_id = answer_id.removeprefix("chatcmpl-")
    if not history.task_ids or history.task_ids[-1] != task_id:
        history.task_ids.append(task_id)


def _usage(usage: Any) -> dict[str, int]:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: getattr(usage, name) for name in names}


def _plain(error: openai.APIStatusError) -> httpx2.Response:
    return error.response  # pyright: ignore[reportReturnType]
