"""A filtered answer: nothing of a match is ever in the log, whoever writes it."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, example, given, settings, strategies as st

from millstream.shared.events import TOKEN, Event
from millstream.shared.pattern_filter import PatternFilter
from millstream.shared.pattern_list import compile_patterns
from millstream.shared.schemas import EarlyStop, SamplingParams, TaskRequest
from millstream.shared.steps import Claim
from millstream.worker.engines.base import TokenLogprobs
from millstream.worker.engines.fake_script import FakeTokenizer
from millstream.worker.job import Job, Limits


class WindowedTokenizer(FakeTokenizer):
    """The same tokens, as one that does not say which bytes they are."""

    text_bytes = None

    def decode(self, token_ids: Sequence[int]) -> str:
        """As the other."""
        return TOKENIZER.decode(token_ids)


TOKENIZER = FakeTokenizer()
LIMITS = Limits(context_length=1000, max_tokens=100)
SURE = TokenLogprobs(-0.25)


def token(text: str | bytes) -> int:
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(b"\x01" + data)


def job(
    words: list[str],
    log: list[Event] | None = None,
    *,
    repeated: str | None = None,
    tokenizer: FakeTokenizer = TOKENIZER,
    **sampling: Any,
) -> Job:
    """A job that has begun; its answer begins with the prompt if that is to be `repeated`."""
    prompt = repeated or "hello there"
    request = TaskRequest(
        "m", prompt=prompt, echo=repeated is not None, sampling=SamplingParams(**sampling)
    )
    output_filter = PatternFilter(compile_patterns(words, [])) if words else None
    work = Job(Claim("t0-x", 1, b"", log or []), request, 0, output_filter)
    work.begin(tokenizer.encode(prompt), tokenizer, LIMITS)
    return work


def written(work: Job) -> list[Event]:
    """The events as the log would hold them."""
    return [Event(seq, TOKEN, ids, data) for seq, (ids, data) in enumerate(work.events, 1)]


def told(work: Job) -> list[str]:
    """The texts, those without a token in brackets, and how it ended."""
    texts = [event.text if event.ids else f"[{event.text}]" for event in written(work)]
    work.written = 0
    return [*texts, *filter(None, [work.row(1000).detail])]


@pytest.mark.parametrize(
    ("pieces", "sampling", "shown"),
    [
        pytest.param(["the", " ba", "d", " x"], {}, ["the", "[ ]", "content_filter"], id="cut"),
        pytest.param(["the", " ba", "dly"], {}, ["the", " ba", "dly", "stop"], id="another word"),
        pytest.param(["the", " bad"], {}, ["the", "[ ]", "content_filter"], id="at the end"),
        pytest.param(["the", " ba"], {}, ["the", " ba", "stop"], id="the end of a beginning"),
        pytest.param(
            ["a", " ba", "d", "ly"], {"max_tokens": 2}, ["a", " ba", "length"], id="length"
        ),
        pytest.param(["bad", "!"], {"stop": ["d!"]}, ["content_filter"], id="a stop string within"),
        pytest.param(["so ", "bad"], {"stop": ["d"]}, ["so ", "content_filter"], id="at its end"),
        pytest.param(["so ", "bad"], {"stop": ["bad"]}, ["so ", "", "stop"], id="the same"),
        pytest.param(["a bad"], {"stop": [" b"]}, ["a", "stop"], id="within a stop string"),
        pytest.param(["a ba"], {"stop": ["a"]}, ["", "stop"], id="a beginning behind one"),
        pytest.param(
            ["so badly"], {"stop": ["ly"]}, ["[so ]", "content_filter"], id="by a stop string"
        ),
        pytest.param(
            ["worse", " ne", "ws"], {"stop": ["e"]}, ["wors", "stop"], id="broken off by one"
        ),
        pytest.param(["bad", "! x"], {"stop": ["x"]}, ["content_filter"], id="before one"),
        pytest.param(["a!", " bad"], {"stop": ["!"]}, ["a", "stop"], id="behind one"),
        pytest.param(["worse", " news"], {}, ["content_filter"], id="two words"),
        pytest.param([b"b\xc3", b"\xb6s", "e "], {}, ["content_filter"], id="half a character"),
        pytest.param(
            [b"\xc3", b"\xb6s", "e "], {}, ["\u00f6", "s", "e ", "stop"], id="free halves"
        ),
    ],
)
def test_what_is_told(
    pieces: list[str | bytes], sampling: dict[str, Any], shown: list[str]
) -> None:
    work = job(["bad", "worse news", "b\u00f6se"], **sampling)
    work.advance([token(piece) for piece in pieces[: sampling.get("max_tokens")]], None)
    if not work.outcome:
        work.advance([], "length" if "max_tokens" in sampling else "stop")
    assert told(work) == shown


@pytest.mark.parametrize(
    ("prompt", "pieces", "shown"),
    [
        ("so ba", ["d", " x"], ["[so ]", "content_filter"]),
        ("so ba", ["dly"], ["[so ba]", "dly", "stop"]),
        ("so ba", [" d"], ["[so ba]", " d", "stop"]),
        ("ba", ["d"], ["content_filter"]),
        ("x" * 300 + " ba", ["d"], ["[" + "x" * 300 + " ]", "content_filter"]),
        ("x" * 300 + "bad" + "x" * 253, ["d"], [f"[{'x' * 300}bad{'x' * 253}]", "d", "stop"]),
    ],
)
def test_a_match_between_a_repeated_prompt_and_the_answer(
    prompt: str, pieces: list[str], shown: list[str]
) -> None:
    work = job(["bad"], repeated=prompt)
    work.advance([token(piece) for piece in pieces], "stop")
    assert told(work) == shown


def test_logprobs_of_a_match_are_not_told() -> None:
    work = job(["bad news"], logprobs=1)
    likely = TokenLogprobs(-0.5, ((token(" bad"), -0.5),))
    for piece in ("so", " bad", " new", "s", "."):
        work.advance([token(piece)], None, [likely if piece == " bad" else SURE])
    assert [data for _, data in work.events] == [
        '{"text":"so","logprobs":[{"token":"so","bytes":[115,111],"logprob":-0.25,'
        '"top_logprobs":[]}]}',
        '" "',
    ]
    free = job(["bad news"], logprobs=1)
    for piece in ("so", " bad", " newt"):
        free.advance([token(piece)], None, [SURE])
    free.advance([], "stop")
    assert [e.logprobs[0].token for e in written(free)] == ["so", " bad", " newt"]


def test_doubt_lets_go_of_what_was_held_back() -> None:
    work = job(["bad news"], early_stop=EarlyStop(0.9, 1))
    work.advance([token("bad")], None, [SURE])
    assert told(work) == ["bad", "low_confidence"]


def test_a_list_that_is_new_to_a_running_answer() -> None:
    """The next owner has another list than the last one, or none, or is the first with one."""
    ids = [token(piece) for piece in ("so ", "ba", "d", " it", " is")]
    for first, second, at, shown in [
        ([], ["bad"], 2, ["so ", "ba", "content_filter"]),  # it was told already
        (["bad"], ["badly"], 2, ["so ", "ba", "d", " it", " is", "stop"]),
        (["badly"], [], 3, ["so ", "ba", "d", " it", " is", "stop"]),
        ([], ["it is"], 5, ["so ", "ba", "d", " it", " is", "content_filter"]),
    ]:
        before = job(first)
        before.advance(ids[:at], None)
        log = written(before)
        after = job(second, log)
        after.advance(ids[len(log) :], "stop")
        assert told(after) == shown


pieces = st.lists(st.sampled_from(["a", "b", " ", "ab", " b", "ba ", b"\xc3", b"\xa9"]), max_size=9)
word_lists = st.lists(st.sampled_from(["a", "ab", "b a", "aa", "\u00e9", "ab ba"]), min_size=1)
stops = st.lists(st.sampled_from(["bb", " a", "ba ba"]), max_size=2)
prompts = st.none() | st.sampled_from(["so b", "b ", "a b", "x" * 256 + "b a"])


@settings(max_examples=50, deadline=None)
@given(
    word_lists,
    stops,
    pieces,
    st.booleans(),
    prompts,
    st.sampled_from([TOKENIZER, WindowedTokenizer()]),
)
@example(["é"], [], [b"\xc3", b"\xc3", b"\xa9"], True, None, WindowedTokenizer())
def test_every_owner_tells_the_text_up_to_the_first_match(  # noqa: PLR0917
    words: list[str],
    stop: list[str],
    made: list[str | bytes],
    logprobs: bool,
    repeated: str | None,
    tokenizer: FakeTokenizer,
) -> None:
    pattern = compile_patterns(words, []).whole
    assume(not pattern.search(repeated or ""))
    ids = [token(piece) for piece in made]
    sampling: dict[str, Any] = {
        "stop": tuple(stop),
        "logprobs": 0 if logprobs else None,
        "repeated": repeated,
        "tokenizer": tokenizer,
    }
    plain = job([], **sampling)
    plain.advance(ids, "stop", [SURE] * len(ids))
    text = "".join(event.text for event in written(plain))
    behind = ((repeated or "") + TOKENIZER.decode(ids))[len(text) :]
    stopped_by = next((item for item in stop if behind.startswith(item)), "")
    begins = [found.start() for found in map(pattern.search, [text, text + stopped_by]) if found]
    expected = text[: min(begins, default=len(text))]
    filtered = len(expected) < len(text)

    whole = job(words, **sampling)
    for token_id in ids:
        whole.advance([token_id], None, [SURE])
        # Whatever comes, a token that is told can be told: all its text is before the match.
        assert expected.startswith("".join(event.text for event in written(whole)))
    whole.advance([], "stop")
    assert "".join(event.text for event in written(whole)) == expected
    assert whole.row(0).detail == ("content_filter" if filtered else "stop")
    if filtered and logprobs:
        names = [name for e in written(whole) for name in json.loads(e.logprobs_data)]
        assert len(
            b"".join(bytes(name["bytes"]) for name in names).decode(errors="replace")
        ) <= len(expected)

    for at in range(len(whole.events) + 1):
        log = written(whole)[:at]
        second = job(words, log, **sampling)
        for token_id in ids[sum(event.token_count for event in log) :]:
            second.advance([token_id], None, [SURE])
        second.advance([], "stop")
        assert second.events == whole.events
        assert second.row(0).detail == whole.row(0).detail
