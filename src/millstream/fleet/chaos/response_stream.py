"""A background response of `/v1/responses` as a chaos client asks for it and reads it."""

import json
import time
from typing import Any

import httpx2

from millstream.fleet.chaos.history import Connection, Seen
from millstream.fleet.chaos.prompts import Prompt
from millstream.fleet.frames import MalformedStream, read_frames

AHEAD = 4
"""By how much its stream's numbers are ahead of its log's."""

_DELTA = "response.output_text.delta"
_ENDS = {
    "response.completed": "completed",
    "response.incomplete": "completed",
    "response.failed": "failed",
}
_FRAMES_BEFORE_THE_LAST = 3
_REASONS = {"completed": "stop", "incomplete": "length"}


def response_body(prompt: Prompt) -> dict[str, Any]:
    """The request, in the background."""
    names = {"max_tokens": "max_output_tokens"}
    sampling = {names.get(name, name): value for name, value in prompt.sampling.items()}
    return {"input": prompt.text, "background": True, **sampling}


async def read_response(connection: Connection, answer: httpx2.Response) -> None:
    """Read the stream after the connection's event; an error that ends it goes to `error`.

    Raises:
        MalformedStream: a number is not the next one.
    """
    expected = connection.after + AHEAD + 1 if connection.after else 0
    async for frame in read_frames(answer.aiter_bytes()):
        if frame.data is None:
            continue
        body = json.loads(frame.data)
        if frame.event == "error":
            connection.error = body["error"]["code"]
            return
        number = body["sequence_number"]
        if number != expected or body["type"] != frame.event or frame.id is not None:
            raise MalformedStream(f"number {expected} is {frame}")
        expected += 1
        if frame.event == _DELTA:
            seen = Seen(number - AHEAD, "token", body["delta"], time.monotonic())
            connection.seen.append(seen)
        elif frame.event in _ENDS:
            _end(connection, frame.event, body)


def _end(connection: Connection, event: str, body: dict[str, Any]) -> None:
    """Write the end down as the log has it, which one can tell from the response but for errors."""
    response = body["response"]
    kind = "cancelled" if response["status"] == "cancelled" else _ENDS[event]
    told: dict[str, Any] = {}
    seq = body["sequence_number"] - AHEAD
    if kind == "completed":
        seq -= _FRAMES_BEFORE_THE_LAST
        told["finish_reason"] = connection.finish_reason = _REASONS[response["status"]]
    elif seq < 0:  # nothing had come before
        seq = 1
    if kind != "failed":
        usage = response["usage"]
        connection.usage = told["usage"] = {
            "prompt_tokens": usage["input_tokens"],
            "completion_tokens": usage["output_tokens"],
            "total_tokens": usage["total_tokens"],
        }
    data = "" if kind == "failed" else json.dumps(told)
    connection.seen.append(Seen(seq, kind, data, time.monotonic()))
    connection.done = True
