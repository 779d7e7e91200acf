"""A job turns ids into numbered events, alike on a first attempt and on any later one."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from millstream.shared.errors import InvalidRequest
from millstream.shared.events import TOKEN, Event
from millstream.shared.schemas import EarlyStop, Message, SamplingParams, TaskRequest
from millstream.shared.steps import Claim
from millstream.worker import token_events
from millstream.worker.engines.base import TokenLogprobs
from millstream.worker.engines.fake_script import FakeTokenizer
from millstream.worker.job import Job, Limits
from millstream.worker.token_events import TokenEvents

TOKENIZER = FakeTokenizer()
PROMPT = TOKENIZER.encode("hello there")
LIMITS = Limits(context_length=1000, max_tokens=100)


def token(text: str | bytes) -> int:
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(b"\x01" + data)


def job(log: list[Event] | None = None, attempt: int = 1, **sampling: Any) -> Job:
    request = TaskRequest("m", (Message("user", "x"),), None, SamplingParams(**sampling))
    return job_of(request, log, attempt)


def job_of(request: TaskRequest, log: list[Event] | None = None, attempt: int = 1) -> Job:
    return Job(Claim("t0-x", attempt, b"", log or []), request, 0)


def written(work: Job) -> list[Event]:
    """The events as the log would hold them."""
    return [
        Event(seq, TOKEN, ids, data) for seq, (ids, data) in enumerate(work.row(10_000).events, 1)
    ]


def texts(work: Job) -> list[str]:
    return [event.text for event in written(work)]


def test_one_event_a_token() -> None:
    work = job()
    generation = work.begin(PROMPT, TOKENIZER, LIMITS)
    assert generation is not None
    assert (generation.prompt_length, generation.max_new_tokens) == (len(PROMPT), 100)
    work.advance([token("a")], None)
    work.advance([token("b"), token("c")], "stop")
    row = work.row(10)
    assert (row.first_seq, row.outcome, row.detail) == (1, "completed", "stop")
    assert [json.loads(data) for _, data in row.events] == ["a", "b", "c"]


def test_the_end_goes_only_with_the_last_event() -> None:
    work = job()
    work.begin(PROMPT, TOKENIZER, LIMITS)
    work.advance([token("a"), token("b"), token("c")], "stop")
    assert work.row(2).outcome == ""
    work.written = 2
    assert (work.row(2).outcome, work.row(2).first_seq) == ("completed", 3)
    work.written = 0  # Redis came back older: everything again
    assert [data for _, data in work.row(10).events] == ['"a"', '"b"', '"c"']


def test_every_resume_point_gives_the_undisturbed_events() -> None:
    pieces = [b"he", b"llo", b" wor", b"\xf0\x9f", b"\x98", b"\x80", b" lo", b" wo", b"x"]
    ids = [token(piece) for piece in pieces]
    whole = job(stop=("lo w!",))
    whole.begin(PROMPT, TOKENIZER, LIMITS)
    whole.advance(ids, "stop")
    expected = whole.row(100)
    for at in range(len(ids) + 1):
        first = job(stop=("lo w!",))
        first.begin(PROMPT, TOKENIZER, LIMITS)
        first.advance(ids[:at], None)
        second = job(written(first), attempt=2, stop=("lo w!",))
        generation = second.begin(PROMPT, TOKENIZER, LIMITS)
        assert generation is not None
        assert list(generation.token_ids) == [*PROMPT, *ids[:at]]
        assert generation.max_new_tokens == 100 - at
        second.advance(ids[at:], "stop")
        second.written = 0
        assert second.row(100).events == expected.events
        assert second.row(100).detail == expected.detail


@given(
    pieces=st.lists(st.sampled_from([b"he", b" ", b"", b"\xf0\x9f", b"\x98", b"\x80", b"\xff"])),
    inherited=st.integers(0, 9),
    stop=st.sampled_from([(), ("e ",)]),
)
def test_remembered_events_are_those_that_would_be_made(
    pieces: list[bytes], inherited: int, stop: tuple[str, ...]
) -> None:
    remembered = TokenEvents(TOKENIZER.text_bytes)
    works = [job(stop=stop), job(stop=stop)]
    for work, events in zip(works, (None, remembered), strict=True):
        work.begin(PROMPT, TOKENIZER, LIMITS, None, events)
        work.advance([token(piece) for piece in pieces[:inherited]], None)
        for piece in pieces[inherited:]:  # as steps bring them
            work.advance([token(piece)], None)
        work.advance([], "stop")
    assert works[0].row(100) == works[1].row(100)
    assert not (stop and remembered)


def test_a_memory_of_events_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_events, "MOST", 3)
    remembered = TokenEvents(TOKENIZER.text_bytes)
    for number in range(10):
        assert remembered[token(str(number))] == (str(token(str(number))), f'"{number}"')
        assert len(remembered) <= 3


def test_a_stop_string_across_tokens_ends_it_there() -> None:
    work = job(stop=("lo w",))
    work.begin(PROMPT, TOKENIZER, LIMITS)
    work.advance([token("he"), token("llo"), token(" wor"), token("ld")], None)
    assert texts(work) == ["he", "l", ""]  # what may begin the stop string is held back
    assert (work.outcome, work.row(9).detail) == ("completed", "stop")


def test_a_death_between_the_last_token_and_the_end() -> None:
    first = job(max_tokens=3)
    first.begin(PROMPT, TOKENIZER, LIMITS)
    first.advance([token("a"), token("b"), token("c")], None)
    second = job(written(first), attempt=2, max_tokens=3)
    assert second.begin(PROMPT, TOKENIZER, LIMITS) is None
    assert second.row(9).events == []
    assert (second.row(9).outcome, second.row(9).detail) == ("completed", "length")


def test_a_death_between_a_stop_string_and_the_end() -> None:
    first = job(stop=("b",))
    first.begin(PROMPT, TOKENIZER, LIMITS)
    first.advance([token("a"), token("b")], None)
    second = job(written(first), attempt=2, stop=("b",))
    assert second.begin(PROMPT, TOKENIZER, LIMITS) is None
    assert (second.row(9).outcome, second.row(9).detail) == ("completed", "stop")


def test_held_back_text_comes_in_an_event_without_tokens() -> None:
    work = job(stop=("lo world",))
    work.begin(PROMPT, TOKENIZER, LIMITS)
    work.advance([token("hello")], None)
    work.advance([], "stop")
    assert [(event.token_count, event.text) for event in written(work)] == [(1, "hel"), (0, "lo")]


@pytest.mark.parametrize(
    ("prompt", "context", "asked", "left"),
    [(10, 12, None, 2), (10, 12, 1, 1), (10, 12, 50, 2), (10, 1000, None, 100)],
)
def test_the_tightest_bound_counts(prompt: int, context: int, asked: int, left: int) -> None:
    generation = job(max_tokens=asked).begin([token("a")] * prompt, TOKENIZER, Limits(context, 100))
    assert generation is not None
    assert generation.max_new_tokens == left


def test_a_prompt_that_fills_the_context_gives_an_empty_answer() -> None:
    work = job()
    assert work.begin([token("a")] * 10, TOKENIZER, Limits(10, 100)) is None
    assert (work.row(9).outcome, work.row(9).detail) == ("completed", "length")


def test_a_prompt_beyond_the_context_is_refused() -> None:
    work = job()
    with pytest.raises(InvalidRequest) as refused:
        work.begin([token("a")] * 11, TOKENIZER, Limits(10, 100))
    work.fail(refused.value)
    error = json.loads(work.row(9).detail)["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_the_fallback_seed_depends_on_the_task_alone() -> None:
    seeds = set()
    for attempt in (1, 2):
        generation = job(attempt=attempt).begin(PROMPT, TOKENIZER, LIMITS)
        assert generation is not None
        seeds.add(generation.fallback_seed)
    assert len(seeds) == 1


def told(*probabilities: float) -> list[TokenLogprobs]:
    return [TokenLogprobs(math.log(p), ((token("x"), -0.5),)) for p in probabilities]


def test_logprobs_lie_in_the_log_in_openais_form() -> None:
    work = job(logprobs=1)
    generation = work.begin(PROMPT, TOKENIZER, LIMITS)
    assert generation is not None
    assert generation.logprobs == 1
    half = b"\xf0\x9f"
    work.advance([token(half), token("\u2028")], "stop", told(0.5, 0.25))
    assert [data for _, data in work.row(9).events[:2]] == [
        r'{"text":"","logprobs":[{"token":"bytes:\\xf0\\x9f","bytes":[240,159],"logprob":-0.693147,'
        r'"top_logprobs":[{"token":"x","bytes":[120],"logprob":-0.5}]}]}',
        # What a client may take for the end of a line is not there.
        '{"text":"\ufffd\\u2028","logprobs":[{"token":"\\u2028","bytes":[226,128,168],'
        '"logprob":-1.386294,"top_logprobs":[{"token":"x","bytes":[120],"logprob":-0.5}]}]}',
    ]
    first, second = written(work)[:2]
    assert (first.text, second.text) == ("", "\ufffd\u2028")
    assert second.logprobs[0].top_logprobs[0].token == "x"
    assert json.loads(second.text_data) == second.text


def test_infinity_is_no_json() -> None:
    work = job(logprobs=0)
    work.begin(PROMPT, TOKENIZER, LIMITS)
    work.advance([token("a"), token("b")], None, [TokenLogprobs(-math.inf), TokenLogprobs(-0.0)])
    assert [event.logprobs[0].logprob for event in written(work)] == [-9999.0, 0.0]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_every_owner_stops_early_at_the_same_token(logprobs: int | None) -> None:
    probabilities = [0.9, 0.1, 0.8, 0.7, 0.2, 0.3, 0.9]  # means of two: .5 .45 .75 .45 .25
    asked = {"early_stop": EarlyStop(0.3, 2), "logprobs": logprobs, "stop": ("f!",)}
    ids = [token(letter) for letter in "abcdefg"]
    whole = job(**asked)
    whole.begin(PROMPT, TOKENIZER, LIMITS)
    whole.advance(ids, "stop", told(*probabilities))
    expected = whole.row(100)
    assert (expected.outcome, expected.detail) == ("completed", "low_confidence")
    # Six tokens, the last of which is held back for the stop string; where it is told how likely
    # they were, the whole event waits.
    ends = ["", "f"] if logprobs is None else ["f"]
    assert [event.text for event in written(whole)] == ["a", "b", "c", "d", "e", *ends]
    for at in range(len(expected.events) + 1):
        second = job(written(whole)[:at], attempt=2, **asked)
        if second.begin(PROMPT, TOKENIZER, LIMITS) is not None:
            second.advance(ids[at:], "stop", told(*probabilities[at:]))
        second.written = 0
        assert second.row(100).events == expected.events
        assert second.row(100).detail == expected.detail


def test_text_let_go_of_before_a_death_does_not_come_twice() -> None:
    first = job(stop=("lo world",))
    first.begin(PROMPT, TOKENIZER, LIMITS)
    first.advance([token("hello")], "stop")
    second = job(written(first), attempt=2, stop=("lo world",))
    assert second.begin(PROMPT, TOKENIZER, LIMITS) is not None  # the model says again that it ends
    second.advance([], "stop")
    second.written = 0
    assert second.row(9).events == first.row(9).events


@pytest.mark.parametrize("prompt", ["hello there", None])
def test_an_echo_is_the_first_event_of_the_first_owner(prompt: str | None) -> None:
    request = TaskRequest("m", prompt=prompt, prompt_ids=tuple(PROMPT), echo=True)
    first = job_of(request)
    assert first.begin(PROMPT, TOKENIZER, LIMITS) is not None
    first.advance([token("a")], None)
    assert [(e.token_count, e.text) for e in written(first)] == [(0, "hello there"), (1, "a")]
    for at in (0, 1, 2):
        second = job_of(request, written(first)[:at], attempt=2)
        generation = second.begin(PROMPT, TOKENIZER, LIMITS)
        assert generation is not None
        assert len(generation.token_ids) == len(PROMPT) + (at == 2)
        second.advance([token("a")] if at < 2 else [], "stop")
        second.written = 0
        assert second.row(9).events == first.row(9).events
