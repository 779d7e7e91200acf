"""Finds stop strings in text that arrives in pieces, and lets none of their characters out.

One Knuth-Morris-Pratt automaton per stop string says after each character how long the longest
suffix is that could still become that string. The longest of them all is what must be held back;
whatever lies before it is free, and how the text was cut into pieces makes no difference (FAULTS
B73).
"""

from collections.abc import Sequence


class StopMatcher:
    """Cuts a text before the stop string that begins first.

    Of two stop strings that overlap, the one that begins first wins even if the other one is
    complete before it: the cut then waits the few characters until that is decided. So the text is
    what a search in the whole text would give.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        self._first_characters = {stop[0] for stop in stops}
        self._held = ""
        self._cut: int | None = None
        """Where in the held text a complete stop string begins, while an earlier one may come."""
        self._stopped = False
        self.behind = ""
        """Once stopped: the stop string, up to where it was decided that the text ends before."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been found; nothing comes out any more."""
        return self._stopped

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; give the text that is free to be shown, and whether it ends here."""
        if self._stopped:
            return "", True
        if not self._automata:  # nearly always
            return text, False
        if not self._held and not any(first in text for first in self._first_characters):
            return text, False
        start = len(self._held)
        self._held += text
        for position in range(start, len(self._held)):
            if self._advance(position):
                return self._end_at_cut(position + 1)
        free = self._earliest_start(len(self._held))
        shown, self._held = self._held[:free], self._held[free:]
        if self._cut is not None:
            self._cut -= free
        return shown, False

    def flush(self) -> str:
        """Give what is still held back, at a normal end of the text."""
        if self._cut is not None:
            return self._end_at_cut(len(self._held))[0]
        rest, self._held = self._held, ""
        for automaton in self._automata:
            automaton.matched = 0
        return rest

    def _advance(self, position: int) -> bool:
        """Read one character; return whether the first stop string is now decided."""
        character = self._held[position]
        end = position + 1
        for automaton in self._automata:
            if automaton.advance(character):
                begin = end - len(automaton.stop)
                self._cut = begin if self._cut is None else min(self._cut, begin)
        if self._cut is None:
            return False
        return self._earliest_start(end) >= self._cut

    def _earliest_start(self, end: int) -> int:
        """Where the earliest unfinished stop string begins, in held text that is `end` long."""
        return end - max((automaton.matched for automaton in self._automata), default=0)

    def _end_at_cut(self, end: int) -> tuple[str, bool]:
        shown, self.behind = self._held[: self._cut], self._held[self._cut : end]
        self._held = ""
        self._cut = None
        self._stopped = True
        return shown, True


class _Automaton:
    """Knuth-Morris-Pratt for one stop string; `matched` characters of it end the text so far."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0] * len(stop)
        """Per prefix, the length of its longest proper prefix that also ends it."""
        length = 0
        for index in range(1, len(stop)):
            while length and stop[index] != stop[length]:
                length = self._fallback[length - 1]
            if stop[index] == stop[length]:
                length += 1
            self._fallback[index] = length

    def advance(self, character: str) -> bool:
        """Read one character; return whether the stop string is complete with it."""
        matched = self.matched
        while matched and self.stop[matched] != character:
            matched = self._fallback[matched - 1]
        if self.stop[matched] == character:
            matched += 1
        complete = matched == len(self.stop)
        # A further match of the same string would begin later, so all that it could do is delay.
        self.matched = 0 if complete else matched
        return complete
