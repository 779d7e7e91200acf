"""The content filter: what is taken in prompts and sent in answers, as an operator has it."""

from pathlib import Path
from typing import Protocol

import msgspec

from millstream.shared.errors import InvalidRequest
from millstream.shared.settings import Settings


class TextFilter(Protocol):
    """The filter on one text that comes in pieces.

    What comes out is the text up to the first match, wherever the pieces end; of the match itself
    nothing ever does. Whoever pushes the same text again stands where the first one stood.
    """

    @property
    def matched(self) -> bool:
        """Whether there was a match; nothing comes out any more."""
        ...

    def follow(self, text: str) -> str:
        """Begin with a text that is allowed as a whole; give what of it is free."""
        ...

    def push(self, text: str) -> str:
        """Take the next piece; give the text that is free."""
        ...

    def flush(self, behind: str = "") -> str:
        """Give the rest, at the end of the text.

        Args:
            behind: What the text was cut before: nothing of it comes out, but a match that begins
                in the text and ends there is one.
        """
        ...


class ContentFilter(Protocol):
    """One for all texts of a process; its calls keep no state."""

    def allows(self, text: str) -> bool:
        """Whether nothing in a whole text matches; may be called from any thread."""
        ...

    def stream(self) -> TextFilter:
        """A filter for one text."""
        ...


class Filters(msgspec.Struct, frozen=True):
    """What looks at prompts and at answers, where there is anything that does."""

    input: ContentFilter | None = None
    output: ContentFilter | None = None


def open_filters(settings: Settings) -> Filters:
    """The filters as set.

    Raises:
        SettingsError: the list cannot be used; says which line.
    """
    if not settings.content_filter:
        return Filters()
    # Its library is needed by nobody else.
    from millstream.shared.pattern_filter import PatternFilter
    from millstream.shared.pattern_list import read_patterns

    both = PatternFilter(read_patterns(Path(settings.content_filter)))
    on = settings.content_filter_on
    return Filters(None if on == "output" else both, None if on == "input" else both)


def refused_prompt(param: str) -> InvalidRequest:
    """What the caller of a prompt with a match is told; not which, or the list could be read so."""
    return InvalidRequest(
        "The prompt has content that this server does not take.",
        param=param,
        code="content_policy_violation",
    )
