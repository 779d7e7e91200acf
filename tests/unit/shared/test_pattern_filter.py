"""The content filter lets out the text up to the first match, however it is cut into pieces."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from millstream.shared import pattern_filter
from millstream.shared.pattern_filter import PatternFilter
from millstream.shared.pattern_list import LONGEST_MATCH, checked_expression, compile_patterns


def run(words: Sequence[str], expressions: Sequence[str], pieces: Sequence[str]) -> list[str]:
    """What comes out after each piece and at the end; a bar where there was a match."""
    stream = PatternFilter(compile_patterns(words, expressions)).stream()
    shown = [stream.push(piece) for piece in pieces]
    shown.append(stream.flush() + "|" * stream.matched)
    return shown


@pytest.mark.parametrize(
    ("words", "expressions", "pieces", "shown"),
    [
        pytest.param(["ass"], [], ["the a", "ss", " x"], ["the ", "", "", "|"], id="in two pieces"),
        pytest.param(["ass"], [], ["the ass", "ess"], ["the ", "assess", ""], id="another word"),
        pytest.param(["ass"], [], ["the ass"], ["the ", "|"], id="at the end"),
        pytest.param(["ass"], [], ["the as"], ["the ", "as"], id="not at the end"),
        pytest.param(["ass"], [], ["gr", "ass "], ["gr", "ass ", ""], id="within a word"),
        pytest.param(["new york"], [], ["new", " jersey"], ["", "new jersey", ""], id="two words"),
        pytest.param([], ["abcd", "bc"], ["xab", "c", "e"], ["x", "", "a", "|"], id="later begin"),
        pytest.param(
            [], ["abcd", "bc"], ["xab", "c", "d", "e"], ["x", "", "", "", "|"], id="first"
        ),
        pytest.param([], [r"\s\b"], ["a ", "b"], ["a", "", "|"], id="an edge to come"),
        pytest.param([], ["a.*b"], ["a1", "2\n", "b"], ["", "a12\n", "b", ""], id="lines"),
    ],
)
def test_pieces(
    words: list[str], expressions: list[str], pieces: list[str], shown: list[str]
) -> None:
    assert run(words, expressions, pieces) == shown


word_lists = st.lists(
    st.text("abA 終é1", min_size=1, max_size=5).map(str.strip).filter(bool), max_size=4
)
atoms = [
    "a",
    "b",
    "[ab]",
    r"\w",
    r"\d",
    ".",
    "é",
    "終",
    r"\b",
    r"\B",
    r"\Z",
    r"\A",
    r"\s",
    "^",
    "$",
]
quantifiers = st.sampled_from(["{1,3}", "?", "+", "*", "+?"])


def _usable(expression: str) -> bool:
    try:
        return bool(checked_expression(expression))
    except ValueError:
        return False


expression_lists = st.lists(
    st.recursive(
        st.sampled_from(atoms),
        lambda some: st.one_of(
            st.tuples(some, some).map("".join),
            st.tuples(some, some).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
            st.tuples(some, quantifiers).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
            some.map(lambda one: rf"({one})\1"),
        ),
        max_leaves=5,
    ).filter(_usable),
    max_size=3,
)
piece_lists = st.lists(st.text("abA \n終é1", max_size=6), max_size=12)


@settings(max_examples=100, deadline=None)
@given(word_lists, expression_lists, piece_lists)
def test_equals_a_search_in_the_whole_text(
    words: list[str], expressions: list[str], pieces: list[str]
) -> None:
    if not words and not expressions:
        return
    text = "".join(pieces)
    found = compile_patterns(words, expressions).whole.search(text)
    expected = text if found is None else text[: found.start()] + "|"
    assert "".join(run(words, expressions, pieces)) == expected


def test_no_more_is_held_back_than_a_match_may_have() -> None:
    pieces = ["abcdefghij"] * 60
    shown = run([], ["a.*z"], pieces)
    held = [10 * at - len("".join(shown[:at])) for at in range(1, 61)]
    assert max(held) == LONGEST_MATCH
    assert "".join(shown) == "".join(pieces)


def test_what_shows_nothing_hides_nothing_in_a_prompt() -> None:
    look = PatternFilter(compile_patterns(["forbidden"], []))
    for hidden in "\u200b\u00ad\ufe0f\u034f\u115f\u3164\u17b4\x00\x08\U000e0061":
        assert not look.allows(f"say forb{hidden}idden x"), ascii(hidden)
    assert look.allows("forb\nidden forb idden")


def test_an_expression_that_takes_for_ever_finds_what_it_might(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pattern_filter, "LONG_LOOK_S", 0.05)
    endless = PatternFilter(compile_patterns([], [r"(?:x|xx)+y"]))
    text = "x" * 60 + " "
    assert not endless.allows(text)
    stream = endless.stream()
    assert (stream.push("fine "), stream.push(text), stream.matched) == ("fine ", "", True)
    assert "took over 0.05 s for a prompt" in caplog.text
