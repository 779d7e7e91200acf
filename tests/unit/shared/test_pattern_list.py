"""What a line of the content filter's list matches, and which lines are refused."""

from pathlib import Path

import pytest

from millstream.shared.errors import SettingsError
from millstream.shared.pattern_filter import PatternFilter
from millstream.shared.pattern_list import MOST_LINES, read_patterns


def allows(tmp_path: Path, line: str, text: str) -> bool:
    path = tmp_path / "list"
    path.write_text(line, "utf-8")
    return PatternFilter(read_patterns(path)).allows(text)


@pytest.mark.parametrize(
    ("line", "found", "free"),
    [
        pytest.param("Ass", ["an ass.", "ASS", "ass"], ["assess", "grass", "ass1"], id="a word"),
        pytest.param("new  york", ["New York", "new\nyork"], ["newyork", "new yorker"], id="words"),
        pytest.param("c++", ["c++.", "(C++)"], ["c+", "c++11"], id="its characters are plain"),
        pytest.param("終わり", ["これで終わりです"], ["終わる"], id="a script without blanks"),
        pytest.param("bad", ["これはbadです"], ["badly"], id="beside one"),
        pytest.param("naïve", ["NAÏVE", "nai\u0308ve"], ["naive"], id="composed or not"),
        pytest.param(
            "bad",
            ["b\u200bad", "\uff42\uff41\uff44", "\U0001d41bad"],
            ["b a d"],
            id="as it is seen",
        ),
        pytest.param("/b[ae]d+/", ["BEDDING", "bad"], ["bid"], id="an expression"),
        pytest.param("/(?-i:SECRET)/", ["SECRET"], ["secret"], id="with a case"),
        pytest.param("/([ab])\\1/\n/([cd])\\1/", ["aa", "dd"], ["ab", "cd"], id="own groups"),
        pytest.param("# bad\n\n  good  \n", ["good"], ["bad"], id="comments and blanks"),
        pytest.param("a b\nabc\nab", ["ab", "abc", "a b"], ["a", "abcd"], id="one in another"),
        pytest.param(r"/^id: \d{3}$/", ["x\nid: 123\ny"], ["id: 1234"], id="lines"),
        pytest.param(r"/[\]\b/+*]{2}\+/", ["//+"], ["/+"], id="sets"),
    ],
)
def test_what_a_line_matches(tmp_path: Path, line: str, found: list[str], free: list[str]) -> None:
    assert [text for text in found if allows(tmp_path, line, text)] == []
    assert [text for text in free if not allows(tmp_path, line, text)] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("good\n/a(b/", "line 2: not a regular expression: missing )"),
        ("/a*/", "line 1: it matches where there is nothing"),
        (r"/\b/", "line 1: it matches where there is nothing"),
        ("/a(?=b)/", "line 1: groups but (?:…), (?P<name>…) and (?ims-ims:…) cannot be used"),
        ("/(?<!a)b/", "line 1: groups but"),
        ("/(?>a|ab)c/", "line 1: groups but"),
        ("/(?i)a/", "line 1: groups but"),
        ("/(a(?1)?b)/", "line 1: groups but"),
        ("/a++b/", "line 1: possessive quantifiers cannot be used"),
        ("/a(*SKIP)b/", "line 1: verbs cannot be used"),
        ("/(?:abc){e<=1}/", "line 1: fuzzy matches cannot be used"),
        (r"/a\Kb/", r"line 1: \G, \K and \L cannot be used"),
        ("x" * 300, "line 1: a word has at most 255 characters"),
        ("# nothing\n", "there is neither a word nor an expression in it"),
        ("\n".join(f"word{n}" for n in range(MOST_LINES + 1)), "10000 lines are the most"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "list"
    path.write_text(text, "utf-8")
    with pytest.raises(SettingsError) as refused:
        read_patterns(path)
    assert str(path) in refused.value.message
    assert said in refused.value.message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"MILLSTREAM_CONTENT_FILTER=.*No such file"):
        read_patterns(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="it is not UTF-8"):
        read_patterns(tmp_path / "bytes")
