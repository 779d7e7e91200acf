"""Where the tokens of an answer wait until all of their text is free of filter and stop strings.

A token's event tells its id and, where asked for, its text and likely alternatives: so the whole
event waits, not its text alone; and what a stop string cuts off is told as often as it is shown,
not at all. Tokens that wait when their worker dies are in no log; the next
owner generates them again, as position-keyed sampling gives them (docs/adr/0009, docs/adr/0023).
"""

from collections import deque
from typing import NamedTuple

from millstream.shared.content_filter import TextFilter
from millstream.shared.events import token_data
from millstream.worker.logprobs import cut_after


class _Waiting(NamedTuple):
    ids: str
    logprobs: str | None
    begin: int
    """Where its text begins, in characters of the answer: behind one that it goes on with."""
    end: int


class Unfiltered:
    """A filter that lets everything through."""

    matched = False

    def follow(self, text: str) -> str:
        """All of it."""
        return text

    def push(self, text: str) -> str:
        """All of it."""
        return text

    def flush(self, behind: str = "") -> str:
        """Nothing was held back."""
        return ""


class TokenGate:
    """One answer's.

    Args:
        text_filter: Of this answer.
        told: How many characters of it are in the log already; they will be read again.
    """

    def __init__(self, text_filter: TextFilter, *, told: int = 0) -> None:
        self._filter = text_filter
        self._waiting: deque[_Waiting] = deque()
        self._told = told
        self._free = ""
        """Free text that is not told, from `_told` on."""
        self._again = told
        """How much of what comes free next was told by an earlier owner."""
        self._begin = self._end = 0
        """Where the text of the last token begins and ends."""
        self._unfinished = 0

    @property
    def matched(self) -> bool:
        """Whether the filter ends the answer."""
        return self._filter.matched

    def repeat(self, prompt: str) -> None:
        """Take a prompt that the answer begins with: a match may begin in it and end behind it."""
        self._take(self._filter.follow(prompt))
        self._end = len(prompt)

    def read(self, text: str, *, made: int, unfinished: int) -> None:
        """Take what came with a token.

        Args:
            text: What no stop string holds back any more.
            made: How many characters the token made, held back or not.
            unfinished: How many characters more it began, which the next one may finish.
        """
        self._take(self._filter.push(text))
        self._begin = self._end + self._unfinished
        self._end += made
        self._unfinished = unfinished

    def tell(self, ids: str, logprobs: str | None) -> list[tuple[str, str]]:
        """Let what was just read wait; (ids, data) of the events that need wait no longer."""
        self._waiting.append(_Waiting(ids, logprobs, self._begin, self._end + self._unfinished))
        events: list[tuple[str, str]] = []
        while self._waiting and self._waiting[0].end <= self._told + len(self._free):
            events.append(self._event(self._waiting.popleft()))
        return events

    def finish(self, text: str, *, behind: str) -> list[tuple[str, str]]:
        """Take the last text; the events of all tokens before a match, and of what else is free.

        Args:
            text: What no stop string holds back any more.
            behind: The stop string that ends the answer; '' if none does. Tokens of it are told
                by their ids alone.
        """
        self._take(self._filter.push(text) + self._filter.flush(behind))
        events: list[tuple[str, str]] = []
        free = self._told + len(self._free)
        for token in self._waiting:
            if token.end > free and self.matched:
                break
            if token.end > free and behind:
                events.append(self._event(token, cut=True, gone=token.begin > free))
            else:
                events.append(self._event(token))
        if self._free:
            events.append(("", token_data(self._free)))
        return events

    def _take(self, text: str) -> None:
        again = min(self._again, len(text))
        self._again -= again
        self._free += text[again:]

    def _event(self, token: _Waiting, *, cut: bool = False, gone: bool = False) -> tuple[str, str]:
        """Its event; of one that is `cut` the log probabilities are cut, too, or `gone`."""
        size = max(0, token.end - self._told)
        text, self._free = self._free[:size], self._free[size:]
        self._told += len(text)
        logprobs = token.logprobs
        if cut and logprobs is not None:
            logprobs = None if gone else cut_after(logprobs, text)
        return token.ids, token_data(text, logprobs)
