"""A response's stream is a pure function of request and log: numbers, bytes, resumption."""

import json
from typing import Any

import pytest
from tests.support import sse

from millstream.api.openai.response_events import Numbering, ResponseFrames
from millstream.shared.events import TOKEN, Event, error_data, token_data
from millstream.shared.schemas import Message, ResponseOptions, SamplingParams, TaskRequest
from millstream.shared.states import TaskState
from millstream.shared.steps import LogPage

TASK = "t0-" + "a" * 26
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
ENDS = {
    "completed": json.dumps({"finish_reason": "stop", "usage": USAGE}),
    "incomplete": json.dumps({"finish_reason": "length", "usage": USAGE}),
    "cancelled": json.dumps({"usage": USAGE}),
    "failed": error_data("It broke.", code="max_attempts", kind="server_error"),
}


def request(*, background: bool = False) -> TaskRequest:
    return TaskRequest(
        "small",
        (Message("system", "Be brief."), Message("user", "Hi")),
        None,
        SamplingParams(max_tokens=9, temperature=0.5),
        ResponseOptions(
            created_at=1_700_000_000, background=background, instructed=True, metadata={"a": "b"}
        ),
    )


def log(texts: list[str], end: str | None) -> list[Event]:
    events = [Event(n, TOKEN, str(n), token_data(text)) for n, text in enumerate(texts, 1)]
    if end is not None:
        kind = "completed" if end == "incomplete" else end
        events.append(Event(len(texts) + 1, kind, "", ENDS[end]))
    return events


def stream(events: list[Event], *, background: bool = False, after: int = -1) -> str:
    frames = ResponseFrames(TASK, request(background=background), after=after)
    text = frames.opening()
    for event in events:
        text += frames.ending(event) if event.terminal else frames.frames([event])
    return text


def kinds(text: str) -> list[str]:
    frames = sse.parse(text)
    for number, frame in enumerate(frames, frames[0].json["sequence_number"]):
        assert frame.json["sequence_number"] == number
        assert frame.json["type"] == frame.event
        assert frame.id is None
    return [frame.event.removeprefix("response.") for frame in frames]


BEGUN = ["output_item.added", "content_part.added"]
DONE = ["output_text.done", "content_part.done", "output_item.done"]
DELTA = "output_text.delta"


@pytest.mark.parametrize(
    ("background", "texts", "end", "expected"),
    [
        (False, [], None, ["created", "in_progress"]),
        (True, [], None, ["created", "queued"]),
        (False, ["a"], None, ["created", "in_progress", *BEGUN, DELTA]),
        (True, ["a"], None, ["created", "queued", "in_progress", *BEGUN, DELTA]),
        (False, [], "completed", ["created", "in_progress", *BEGUN, *DONE, "completed"]),
        (False, [], "failed", ["created", "in_progress", "failed"]),
        (True, [], "cancelled", ["created", "queued", "failed"]),
        (
            True,
            ["a", "", "b"],
            "incomplete",
            ["created", "queued", "in_progress", *BEGUN, DELTA, DELTA, DELTA, *DONE, "incomplete"],
        ),
        (False, ["a"], "cancelled", ["created", "in_progress", *BEGUN, DELTA, "failed"]),
    ],
)
def test_what_a_log_stands_for(
    background: bool, texts: list[str], end: str | None, expected: list[str]
) -> None:
    events = log(texts, end)
    text = stream(events, background=background)
    assert kinds(text) == expected
    state = TaskState(events[-1].kind) if end else TaskState.RUNNING
    numbering = Numbering(request(background=background))
    assert numbering.last(LogPage(state, len(events), "small", [])) == len(expected) - 1
    for frame in sse.parse(text):
        if frame.event == "response.output_text.delta":
            seen = numbering.seen(frame.json["sequence_number"])
            assert frame.json["delta"] == texts[seen - 1]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("texts", [[], ["Hello", " wor", "ld"]])
def test_a_resumed_stream_is_the_rest_of_the_whole_one(
    background: bool, end: str, texts: list[str]
) -> None:
    events = log(texts, end)
    whole = stream(events, background=background).split("\n\n")
    for after in range(len(whole) - 1):
        rest = stream(events, background=background, after=after).split("\n\n")
        assert rest == whole[after + 1 :]


def test_the_object_says_what_was_asked_and_what_came() -> None:
    frames = sse.parse(stream(log(["Hello", "\u2028"], "completed")))
    created, last = frames[0].json["response"], frames[-1].json["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert last["id"] == created["id"] == f"resp_{TASK}"
    assert last["instructions"] == "Be brief."
    assert last["metadata"] == {"a": "b"}
    assert (last["temperature"], last["top_p"], last["max_output_tokens"]) == (0.5, 1.0, 9)
    (message,) = last["output"]
    assert message["content"][0]["text"] == "Hello\u2028"
    assert message["id"] == frames[2].json["item"]["id"] == frames[4].json["item_id"]
    assert (message["status"], last["status"]) == ("completed", "completed")
    assert last["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }


def test_no_client_finds_a_line_break_in_a_frame() -> None:
    text = stream(log(["a\u2028b\u2029c\x85d\r\ne"], "completed"))
    assert text.splitlines() == text.split("\n")[:-1]


@pytest.mark.parametrize(
    ("end", "status", "item", "reason"),
    [
        ("incomplete", "incomplete", "incomplete", "max_output_tokens"),
        ("cancelled", "cancelled", "incomplete", None),
        ("failed", "failed", "incomplete", None),
    ],
)
def test_nothing_is_called_finished_that_is_not(
    end: str, status: str, item: str, reason: str | None
) -> None:
    last: dict[str, Any] = sse.parse(stream(log(["Hello"], end)))[-1].json["response"]
    assert last["status"] == status
    assert last["output"][0]["status"] == item
    assert last["output"][0]["content"][0]["text"] == "Hello"
    assert (last["incomplete_details"] or {}).get("reason") == reason
    expected = {"code": "server_error", "message": "It broke. (max_attempts)"}
    assert last["error"] == (expected if end == "failed" else None)


def test_a_prompt_at_fault_is_told_in_openais_words() -> None:
    data = error_data("Too long.", code="context_length_exceeded", kind="invalid_request_error")
    last = sse.parse(stream([Event(1, "failed", "", data)]))[-1].json["response"]
    assert last["error"] == {
        "code": "invalid_prompt",
        "message": "Too long. (context_length_exceeded)",
    }
    assert last["output"] == []


def test_an_error_of_the_stream_has_the_next_number() -> None:
    error = {"error": {"message": "Going.", "type": "server_error", "param": None, "code": "x"}}
    frames = ResponseFrames(TASK, request(), after=7)
    frames.opening()
    assert sse.parse(frames.trouble(error))[0].json["sequence_number"] == 8
    assert frames.farewell(error) is None  # the next event of the log will have it
    frames = ResponseFrames(TASK, request(), attached=True)
    frames.opening()
    frames.frames(log(["a"], None))
    assert frames.farewell(error) == frames.trouble(error)
    (frame,) = sse.parse(frames.trouble(error))
    assert frame.event == "error"
    assert frame.json["sequence_number"] == 5
    assert frame.json["error"] == error["error"]
    assert (frame.json["code"], frame.json["message"]) == ("x", "Going.")
