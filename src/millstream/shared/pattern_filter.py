"""A content filter by patterns: it holds back from where a match may have begun."""

import logging
import unicodedata

import regex

from millstream.shared.pattern_list import LONGEST_MATCH, Patterns

logger = logging.getLogger(__name__)

# An expression that takes so long for a piece of text is a bad one; what it might have found is
# taken for found.
LOOK_S = 0.1
LONG_LOOK_S = 2.0  # for a whole prompt
# Also what a terminal or page shows nothing of: variation selectors, fillers, control characters.
_INVISIBLE = regex.compile(r"(?:\p{Cf}|\p{Default_Ignorable_Code_Point}|[\x00-\x08\x0e-\x1f\x7f])+")


class PatternFilter:
    """What matches an expression is neither taken nor sent."""

    def __init__(self, patterns: Patterns) -> None:
        self._patterns = patterns

    def allows(self, text: str) -> bool:
        """Whether nothing matches: neither as it is written nor as it is seen.

        The second is without what is invisible (zero-width characters), and with wide, styled and
        composed letters as plain ones (NFKC).
        """
        seen = unicodedata.normalize("NFKC", _INVISIBLE.sub("", text))
        return not any(map(self._matches, {text, seen}))

    def _matches(self, text: str) -> bool:
        try:
            return (
                self._patterns.whole.search(text, timeout=LONG_LOOK_S, concurrent=True) is not None
            )
        except TimeoutError:
            logger.error("the content filter took over %g s for a prompt", LONG_LOOK_S)
            return True

    def stream(self) -> "PatternStream":
        """A filter for one text."""
        return PatternStream(self._patterns)


class PatternStream:
    """One text on its way.

    A position is free once no match can begin there any more. A match that ends where the text
    ends, so far, is none yet: the next character may make another word of it.
    """

    def __init__(self, patterns: Patterns) -> None:
        self._patterns = patterns
        self._before = ""
        """The last free character, at which a word's beginning is told."""
        self._held = ""
        self._matched = False

    @property
    def matched(self) -> bool:
        """Whether there was a match; nothing comes out any more."""
        return self._matched

    def follow(self, text: str) -> str:
        """Begin with a text that is allowed as a whole; give what of it is free."""
        free = text[:-LONGEST_MATCH]
        self._before = free[-1:]
        return free + self.push(text[-LONGEST_MATCH:])

    def push(self, text: str) -> str:
        """Take the next piece; give the text that is free."""
        return self._take(text) if text else ""

    def flush(self, behind: str = "") -> str:
        """Give the rest, at the end of the text, but nothing of a match that ends `behind` it."""
        return self._take("", end=True, behind=behind)

    def _take(self, piece: str, *, end: bool = False, behind: str = "") -> str:
        if self._matched:
            return ""
        text, first = self._before + self._held + piece, len(self._before)
        try:
            at = self._look(text, first, end=end)
            if behind:
                at = min(at, self._look_behind(text, first, behind))
        except TimeoutError:
            logger.error("the content filter took over %g s for a piece of text", LOOK_S)
            at, self._matched = first, True
        if not self._matched and not end:
            at = max(at, len(text) - LONGEST_MATCH)
        free, self._held = text[first:at], "" if self._matched else text[at:]
        self._before = text[:at][-1:]
        return free

    def _look(self, text: str, first: int, *, end: bool) -> int:
        """Up to where the text is free; notes whether a match begins there."""
        pattern = self._patterns.whole if end else self._patterns.so_far
        found = pattern.search(text, first, partial=not end, timeout=LOOK_S)
        if found is None:
            return len(text)
        if found.partial:
            return found.start()
        # A whole match is preferred to one that goes on, though this one may begin before it.
        for at in range(max(first, found.start() - LONGEST_MATCH), found.start()):
            if not end and pattern.match(text, at, partial=True, timeout=LOOK_S):
                return at
        self._matched = end or found.end() < len(text)
        return found.start()

    def _look_behind(self, text: str, first: int, behind: str) -> int:
        """The same of a text that was cut: where a match begins that goes on behind the cut."""
        found = self._patterns.whole.search(text + behind, first, timeout=LOOK_S)
        if found is None or found.start() >= len(text):
            return len(text)
        self._matched = True
        return found.start()
