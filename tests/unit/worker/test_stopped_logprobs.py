"""What a stop string cuts off is not told by way of log probabilities either (FAULTS B74)."""

import itertools
import json

import pytest
from hypothesis import example, given, settings, strategies as st

from millstream.shared.events import TOKEN, Event
from millstream.shared.schemas import SamplingParams, TaskRequest
from millstream.shared.steps import Claim
from millstream.worker.engines.base import TokenLogprobs
from millstream.worker.engines.fake_script import FakeTokenizer
from millstream.worker.job import Job, Limits

TOKENIZER = FakeTokenizer()
LIMITS = Limits(context_length=1000, max_tokens=100)
LIKELY = TokenLogprobs(-0.25, ((1, -0.5),))


def job(stops: list[str], log: list[Event] | None = None) -> Job:
    sampling = SamplingParams(stop=tuple(stops), logprobs=1)
    request = TaskRequest("m", prompt="hello", sampling=sampling)
    work = Job(Claim("t0-x", 1, b"", log or []), request, 0)
    work.begin(TOKENIZER.encode("hello"), TOKENIZER, LIMITS)
    return work


def finished(stops: list[str], pieces: list[bytes], log: list[Event] | None = None) -> Job:
    """A job that took these tokens one by one, from where the log ends."""
    work = job(stops, log)
    for piece in pieces[sum(event.token_count for event in log or []) :]:
        work.advance([int.from_bytes(b"\x01" + piece)], None, [LIKELY])
    work.advance([], "stop")
    work.written = 0
    return work


def written(work: Job) -> list[Event]:
    rows = work.row(10_000).events
    return [Event(seq, TOKEN, ids, data) for seq, (ids, data) in enumerate(rows, 1)]


@pytest.mark.parametrize(
    ("pieces", "tokens"),
    [
        (["one", " two", "STOP", " three"], ["one", " two"]),
        (["one", " twoST", "OP three"], ["one", " two"]),
        (["one", " two", "ST", "ATE"], ["one", " two", "ST", "ATE"]),
        (["oneST"], ["oneST"]),
        (["STOP"], []),
        (
            ["\u65e5".encode()[:1], "\u65e5".encode()[1:] + b"aST", "OP"],
            ["bytes:\\xe6", "bytes:\\x97\\xa5\\x61"],
        ),
    ],
)
def test_what_is_told(pieces: list[str | bytes], tokens: list[str]) -> None:
    work = finished(["STOP"], [p.encode() if isinstance(p, str) else p for p in pieces])
    told = [token for event in written(work) for token in event.logprobs]
    assert [token.token for token in told] == tokens
    assert {token.logprob for token in told} <= {-0.25}
    # Those that are not told how likely they were are in the log: they were generated, and count.
    assert work.tokens == sum(event.token_count for event in written(work)) >= len(tokens)


@given(
    st.text("abc\u65e5", min_size=1, max_size=12),
    st.sets(st.integers(1, 20)),
    st.lists(st.text("abc\u65e5", min_size=1, max_size=4), min_size=1, max_size=3),
)
@example("ab\u65e5a", {1, 3, 4}, ["\u65e5a"])
@example("\u65e5a", {1}, ["a"])  # the second token ends the first character, and is cut behind it
@example("\u65e5a\u65e5b", {1, 5}, ["a"])
@settings(max_examples=400)
def test_tokens_join_to_the_text_for_every_owner(
    whole: str, cuts: set[int], stops: list[str]
) -> None:
    raw = whole.encode()
    edges = [0, *sorted(cut for cut in cuts if cut < len(raw)), len(raw)]
    pieces = [raw[begin:end] for begin, end in itertools.pairwise(edges)]
    first = finished(stops, pieces)
    events = written(first)
    found = [whole.find(stop) for stop in stops if stop in whole]
    text = whole[: min(found)] if found else whole
    assert "".join(event.text for event in events) == text
    assert (
        b"".join(bytes(each.bytes) for event in events for each in event.logprobs) == text.encode()
    )
    for at in range(len(events) + 1):
        assert finished(stops, pieces, events[:at]).row(100) == first.row(100)


def test_the_form_is_that_of_whole_tokens() -> None:
    (data,) = [data for _, data in finished(["b"], [b"ab"]).row(9).events]
    assert json.loads(data) == {
        "text": "a",
        "logprobs": [
            {
                "token": "a",
                "bytes": [97],
                "logprob": -0.25,
                "top_logprobs": [{"token": TOKENIZER.decode([1]), "bytes": [], "logprob": -0.5}],
            }
        ],
    }
