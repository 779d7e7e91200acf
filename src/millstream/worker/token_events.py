"""The events of tokens that are whole characters: made once, whatever answers they come in."""

from codecs import utf_8_decode
from collections.abc import Callable

from millstream.shared.events import token_data

MOST = 32_768  # tokens; bounds the memory for them, some 300 bytes each


class TokenEvents(dict[int, tuple[str, str] | None]):
    """(ids, data) by token; None for one that needs its neighbours to be text.

    It holds for answers that are the bytes of their tokens (`Tokenizer.text_bytes`), where the
    last character is whole and nothing waits: no stop string, no filter, no log probabilities.

    Args:
        text_bytes: Gives a token's bytes.
    """

    def __init__(self, text_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._text_bytes = text_bytes

    def __missing__(self, token_id: int) -> tuple[str, str] | None:
        if len(self) >= MOST:
            self.clear()
        raw = self._text_bytes(token_id)
        text, used = utf_8_decode(raw, "replace", False)
        event = (str(token_id), token_data(text)) if used == len(raw) else None
        self[token_id] = event
        return event
