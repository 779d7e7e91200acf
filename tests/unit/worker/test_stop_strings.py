"""Stop strings are cut out wherever the pieces of the text happen to end."""

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from millstream.worker.stop_strings import StopMatcher


def run(stops: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], bool]:
    """Push all pieces; what came out of each, then of the flush, and whether it stopped."""
    matcher = StopMatcher(stops)
    shown = [matcher.push(piece)[0] for piece in pieces]
    return [*shown, matcher.flush()], matcher.stopped


def cut(text: str, stops: Sequence[str]) -> str:
    """The same by a search in the whole text."""
    starts = [text.find(stop) for stop in stops if stop in text]
    return text[: min(starts)] if starts else text


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "stopped"),
    [
        pytest.param(
            ["lo w"], ["he", "llo", " wor", "ld"], ["he", "l", "", "", ""], True, id="B73"
        ),
        pytest.param([], ["a", "b"], ["a", "b", ""], False, id="no stop strings"),
        pytest.param(["x"], ["ab", "cxd", "e"], ["ab", "c", "", ""], True, id="one character"),
        pytest.param(["stop"], ["stop"], ["", ""], True, id="the whole text"),
        pytest.param(["stop"], ["s", "to", "p"], ["", "", "", ""], True, id="whole, in pieces"),
        pytest.param(["stop"], ["sto"], ["", "sto"], False, id="unfinished at the end"),
        pytest.param(["stop"], ["sto", "ne"], ["", "stone", ""], False, id="something else"),
        pytest.param(["aab"], ["aa", "a", "b"], ["", "a", "", ""], True, id="begins in itself"),
        pytest.param(["aab"], ["aaaa"], ["aa", "aa"], False, id="only what is needed"),
        pytest.param(["b", "c"], ["a", "cb"], ["a", "", ""], True, id="the earlier of two"),
        pytest.param(["bc", "abcd"], ["xab", "c", "d"], ["x", "", "", ""], True, id="begins first"),
        pytest.param(["bc", "abcd"], ["xab", "c", "e"], ["x", "", "a", ""], True, id="it did not"),
        pytest.param(["bc", "abcd"], ["xab", "c"], ["x", "", "a"], True, id="never decided"),
        pytest.param(["ab", "ab"], ["xa", "b"], ["x", "", ""], True, id="twice the same"),
        pytest.param(["終わり"], ["これで終", "わりです"], ["これで", "", ""], True, id="unicode"),
        pytest.param(["👩‍👧"], ["a👩", "‍👧b"], ["a", "", ""], True, id="joined emoji"),
        pytest.param(["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", "", ""], True, id="newlines"),
        pytest.param(["ab"], ["", "a", "", "c"], ["", "", "", "ac", ""], False, id="empty pieces"),
    ],
)
def test_pieces(stops: list[str], pieces: list[str], shown: list[str], stopped: bool) -> None:
    assert run(stops, pieces) == (shown, stopped)


def test_says_so_at_the_piece_that_completes_the_stop_string() -> None:
    matcher = StopMatcher(["lo w"])
    answers = [matcher.push(piece) for piece in ["he", "llo", " wor", "ld"]]
    assert answers == [("he", False), ("l", False), ("", True), ("", True)]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="a stop string must not be empty"):
        StopMatcher(["a", ""])


stop_lists = st.lists(st.text("ab\u00e9", min_size=1, max_size=5), max_size=4)
piece_lists = st.lists(st.text("ab\u00e9", max_size=6), max_size=12)


@given(stop_lists, piece_lists)
def test_equals_a_search_in_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    shown, stopped = run(stops, pieces)
    assert "".join(shown) == cut(text, stops)
    assert stopped == any(stop in text for stop in stops)


@given(stop_lists, piece_lists)
def test_holds_back_the_longest_possible_beginning_and_no_more(
    stops: list[str], pieces: list[str]
) -> None:
    matcher = StopMatcher(stops)
    text, shown = "", ""
    for piece in pieces:
        text += piece
        shown += matcher.push(piece)[0]
        if any(stop in text for stop in stops):
            return
        held = max(
            (n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0
        )
        assert shown == text[: len(text) - held]
