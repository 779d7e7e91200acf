"""Turns one task's token ids into text, piece by piece, without ever cutting a character in two.

Where a text is nothing but its tokens' bytes put together (byte-level BPE: most models), these are
read as UTF-8 as they come. For all other tokenizers the idea is the windowed decoding of Hugging
Face's text-generation-inference (`decode_token` with its prefix and read offsets), which vLLM uses
as well: decode the last few tokens together and give out what is new, so that a tokenizer which
drops a leading space or joins bytes across tokens sees the neighbours it needs. Two things differ:
the text before an incomplete character is given out at once, and the window is bounded also when
bytes are invalid for ever.

A piece depends on nothing but the ids up to it. So a worker that takes over a task feeds it the
ids of the log and goes on with the same pieces, also from within a character (FAULTS B80, B82).
"""

from codecs import utf_8_decode
from collections.abc import Callable
from typing import Protocol

from millstream.worker.engines.base import Tokenizer

_REPLACEMENT = "\ufffd"

# A window is cut once it is this long and ends with a whole character. Cutting costs a second
# decode; eight makes that rare, and a decode of eight tokens costs hardly more than one of two.
_LAZY_WINDOW = 8
# So many trailing U+FFFD are no unfinished character any more. A tokenizer with byte fallback
# shows each byte of a run as one U+FFFD until the run is valid, and a window of whole characters
# holds fewer than _LAZY_WINDOW + 4 such bytes.
_SURELY_INVALID = 16
# An unfinished character has at most three bytes, each of which may show as a U+FFFD.
_UNFINISHED = 3
# From here on the window is cut within invalid bytes, or between tokens that never end with a
# whole character, to half its length. Each kept token has a byte at least, so half a window has
# more characters than _UNFINISHED on either side of the cut.
_LONG_WINDOW = 64
# A window that defies even that (byte fallback with an invalid byte in an endless run) is cut
# nevertheless: its text is garbage already, and memory stays bounded.
_LONGEST_WINDOW = 256
# Tokens without text at the very beginning are kept, since a tokenizer may drop the space of the
# first one only; more than this many are no spaces but special tokens.
_LEADING_EMPTY = 16


class Detokenizer(Protocol):
    """The text of one task; `"".join(pieces) + flush()` is the decode of all its ids."""

    @property
    def unfinished(self) -> int:
        """How many characters are not certain yet; 0 if the last token ended with a whole one."""
        ...

    def push(self, token_id: int) -> str:
        """Take the next token; give the text that has become certain with it."""
        ...

    def flush(self) -> str:
        """Give the rest at the end; bytes that never became a character are U+FFFD."""
        ...


def open_detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    """What suits a tokenizer, for one text."""
    text_bytes = tokenizer.text_bytes
    return WindowDetokenizer(tokenizer) if text_bytes is None else ByteDetokenizer(text_bytes)


class ByteDetokenizer:
    """For tokenizers whose text is the bytes of its tokens.

    Args:
        text_bytes: Gives a token's bytes, which need not be whole characters.
    """

    def __init__(self, text_bytes: Callable[[int], bytes]) -> None:
        self._text_bytes = text_bytes
        self._rest = b""
        """The beginning of a character, three bytes at the most."""

    @property
    def unfinished(self) -> int:
        """1 if the last token ended within a character, else 0."""
        return int(bool(self._rest))

    def push(self, token_id: int) -> str:
        """Take the next token; give the text that has become certain with it."""
        raw = self._rest + self._text_bytes(token_id)
        text, used = utf_8_decode(raw, "replace", False)
        self._rest = raw[used:]
        return text

    def flush(self) -> str:
        """Give the rest at the end; bytes that never became a character are U+FFFD."""
        text, self._rest = self._rest.decode(errors="replace"), b""
        return text


class WindowDetokenizer:
    """For any tokenizer: it decodes the last few tokens anew with each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._text: str = ""
        """The decoded window."""
        self._shown: int = 0
        """How many characters of `_text` are out."""
        self._boundary = 0
        """How many tokens of the window there were when it last ended with a whole character."""

    @property
    def unfinished(self) -> int:
        """How many characters are not certain yet; bytes that belong to none wait with them."""
        return len(self._text) - self._shown

    def push(self, token_id: int) -> str:
        """Take the next token; give the text that has become certain with it."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        if text == self._text and self._is_needless(token_id):
            self._window.pop()
            return ""
        self._text = text
        held = len(text) - len(text.rstrip(_REPLACEMENT))
        if held >= _SURELY_INVALID:
            held = _UNFINISHED
        end = len(text) - held
        piece = text[self._shown : end]
        self._shown = max(self._shown, end)
        if piece and not held:
            self._close_at_boundary()
        elif len(self._window) >= _LONG_WINDOW:
            self._cut_long_window()
        return piece

    def flush(self) -> str:
        """Give the rest at the end; bytes that never became a character are U+FFFD."""
        rest = self._text[self._shown :]
        self._shown = len(self._text)
        return rest

    def _is_needless(self, token_id: int) -> bool:
        """Whether a token that changed nothing has no bytes that could matter later."""
        if not self._text and len(self._window) <= _LEADING_EMPTY:
            return False
        return not self._tokenizer.decode([token_id])

    def _close_at_boundary(self) -> None:
        """Note a whole character at the window's end; cut a longer window before the last piece."""
        if len(self._window) >= _LAZY_WINDOW and self._boundary:
            # The tokens of the last piece stay: with them in front, the next token is decoded as
            # the one in the middle of a text that it is.
            del self._window[: self._boundary]
            self._text = self._tokenizer.decode(self._window)
            self._shown = len(self._text)
        self._boundary = len(self._window)

    def _cut_long_window(self) -> None:
        """Halve a window without boundaries, if what is not yet out stays what it is."""
        window = self._window[-(_LONG_WINDOW // 2) :]
        text = self._tokenizer.decode(window)
        waiting = self._text[self._shown :]
        shown = len(text) - len(waiting)
        # A cut through a character can spoil the bytes of that one character only, since UTF-8
        # finds its way back at the next; so a few characters later all is as before.
        consistent = shown > _UNFINISHED and text[shown:] == waiting
        if consistent or len(self._window) >= _LONGEST_WINDOW:
            self._window, self._text = window, text
            self._shown = max(0, shown)
            self._boundary = 0
