"""A list of words and regular expressions, a line each, as one regular expression.

`regex` is what compiles it: unlike `re` it can say that a match may still be going on at the end of
a text (`partial=True`), which is what has to be held back.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import regex

from millstream.shared.errors import SettingsError

MOST_LINES = 10_000
"""Compiling so many takes seconds."""
LONGEST_MATCH = 256
"""Characters; longer ones are not looked for, so no more than these are ever held back."""

FLAGS = regex.VERSION0 | regex.IGNORECASE | regex.MULTILINE
# Letters and digits of scripts that put spaces between words; Han, kana, Thai and the like do not.
_SPACED = r"[^\W\p{Line_Break=ID}\p{Line_Break=CJ}\p{Line_Break=SA}]"
# Whether there is a match must be decided by its own characters and one to each side: the text
# comes in pieces, and what was sent cannot be taken back.
_UNDECIDABLE = (
    (
        r"\(\?(?!:|P?<[A-Za-z_]|P=|[ims]*(?:-[ims]+)?:)",
        "groups but (?:…), (?P<name>…) and (?ims-ims:…)",
    ),
    (r"\(\*", "verbs"),
    (r"[*+?}]\+", "possessive quantifiers"),
    (r"\\[GKL]", r"\G, \K and \L"),
    (r"\{(?!\d*,?\d*\})", "fuzzy matches"),
)
# What stands for itself, whatever is in it: escapes and sets.
_PLAIN = regex.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", regex.DOTALL)
_EDGES = (r"\b", r"\B", r"\m", r"\M")
_PROBES = ("", " ", "a", "a b", "1\n2", "x.y")


class Patterns(NamedTuple):
    """The same expression twice."""

    whole: "regex.Pattern[str]"
    """For a whole text."""
    so_far: "regex.Pattern[str]"
    """For a text that goes on: what is undecided at its end, matches there."""


def read_patterns(path: Path) -> Patterns:
    """The expression that matches what any line does.

    A line is a word or several, matched whatever their case and as a whole; or `/…/`, a regular
    expression; or a comment behind `#`, or blank.

    Raises:
        SettingsError: the file cannot be read, a line cannot be used, or there is none.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingsError(f"MILLSTREAM_CONTENT_FILTER={path}: cannot be read: {why}") from None
    words: set[str] = set()
    expressions: list[str] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        try:
            if not line or line.startswith("#"):
                continue
            if len(line) > 1 and line[0] == line[-1] == "/":
                expressions.append(checked_expression(line[1:-1]))
            else:
                words.add(_checked_word(line))
        except ValueError as error:
            raise SettingsError(f"{path}, line {number}: {error}") from None
    if not words and not expressions:
        raise SettingsError(f"{path}: there is neither a word nor an expression in it")
    if len(words) + len(expressions) > MOST_LINES:
        raise SettingsError(f"{path}: {MOST_LINES} lines are the most")
    return compile_patterns(words, expressions)


def compile_patterns(words: Iterable[str], expressions: Iterable[str]) -> Patterns:
    """One expression of all; groups are numbered anew in each line of the list."""
    branches = [f"(?:{expression})" for expression in expressions]
    if words := {word.lower() for word in words}:
        branches.insert(0, f"(?<!{_SPACED})(?:{_trie(words)})(?!{_SPACED})")
    source = f"(?|{'|'.join(branches)})"
    whole = regex.compile(source, FLAGS)
    open_ended = _PLAIN.sub(_open_ended, source)
    return Patterns(whole, whole if open_ended == source else regex.compile(open_ended, FLAGS))


def checked_expression(expression: str) -> str:
    """The expression, if it can be used on a text that comes in pieces.

    Raises:
        ValueError: it cannot; says why.
    """

    def reduced(plain: "regex.Match[str]") -> str:
        return plain[0] if plain[0] in (r"\G", r"\K", r"\L") else "_"

    without_plain = _PLAIN.sub(reduced, expression)
    for pattern, what in _UNDECIDABLE:
        if regex.search(pattern, without_plain):
            raise ValueError(f"{what} cannot be used on a text that comes in pieces")
    try:
        compiled = regex.compile(expression, FLAGS)
    except regex.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if any(found and not found[0] for found in map(compiled.search, _PROBES)):
        raise ValueError("it matches where there is nothing")
    return expression


def _open_ended(plain: "regex.Match[str]") -> str:
    r"""Where the text ends so far, it may turn out either way whether a word ends (`\b`)."""
    return rf"(?:{plain[0]}|\Z)" if plain[0] in _EDGES else plain[0]


def _checked_word(word: str) -> str:
    if len(word) > LONGEST_MATCH - 1:
        raise ValueError(f"a word has at most {LONGEST_MATCH - 1} characters")
    return " ".join(word.split())


def _trie(words: set[str]) -> str:
    """An expression for all words that reads their common beginnings once."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _expression(root)


def _expression(node: dict[str, Any]) -> str:
    ways = [
        (r"\s+" if character == " " else regex.escape(character)) + _expression(rest)
        for character, rest in sorted(node.items())
        if character
    ]
    if not ways:
        return ""
    whole = ways[0] if len(ways) == 1 and "" not in node else f"(?:{'|'.join(ways)})"
    return f"{whole}?" if "" in node else whole
