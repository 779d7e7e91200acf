"""Writes down how likely tokens were, in OpenAI's form, as the log keeps it."""

import json
from collections.abc import Callable, Sequence

from millstream.shared.events import one_line
from millstream.worker.engines.base import Tokenizer, TokenLogprobs

# OpenAI's and vLLM's word for minus infinity, which JSON has not.
LEAST = -9999.0
# What float32 logits of different batches agree in, and more than anyone reads.
DIGITS = 6
_LATER_BYTES = bytes(range(0x80, 0xC0))
"""Of a character in UTF-8, all but the first."""
MOST_NAMES = 32_768  # bounds the memory for names; a few hundred bytes each


def rounded(logprob: float) -> float:
    """A log probability as it is kept."""
    return max(round(logprob, DIGITS), LEAST) + 0.0  # no -0.0


class LogprobWriter:
    """One for all tasks of a worker: it remembers the names of tokens.

    Args:
        tokenizer: The model's.
        allows: Whether a token that did not come may be named; None: any may.
    """

    def __init__(self, tokenizer: Tokenizer, allows: Callable[[str], bool] | None = None) -> None:
        self._tokenizer = tokenizer
        self._allows = allows
        self._names: dict[int, str] = {}
        self._untold: set[int] = set()
        """Tokens of `_names` that are not told as alternatives."""

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> str:
        """A JSON array with an object a token."""
        return f"[{','.join(map(self._write_token, token_ids, logprobs))}]"

    def _write_token(self, token_id: int, logprobs: TokenLogprobs) -> str:
        named = [(other, f"{self._alternative(other, value)}}}") for other, value in logprobs.top]
        top = ",".join(name for other, name in named if other not in self._untold)
        return f'{self._alternative(token_id, logprobs.logprob)},"top_logprobs":[{top}]}}'

    def _alternative(self, token_id: int, logprob: float) -> str:
        """The object without its end."""
        name = self._names.get(token_id)
        if name is None:
            if len(self._names) >= MOST_NAMES:
                self._names.clear()
                self._untold.clear()
            raw = self._tokenizer.token_bytes(token_id)
            name = self._names[token_id] = _name(raw)
            if self._allows is not None and not self._allows(raw.decode(errors="replace")):
                self._untold.add(token_id)
        return f"{name}{rounded(logprob)!r}"


def cut_after(written: str, text: str) -> str | None:
    """What was written for one token, with no more of it than what ends with a text in it.

    What it adds to a character that an earlier one began stays, too. None if nothing does.
    """
    (token,) = json.loads(written)
    raw = bytes(token["bytes"])
    shown = text.encode()
    at = raw.find(shown, len(raw) - len(raw.lstrip(_LATER_BYTES)))
    raw = raw[: at + len(shown)] if at >= 0 else shown
    return one_line([token | {"token": _text(raw), "bytes": list(raw)}]) if raw else None


def _name(raw: bytes) -> str:
    """The object of a token up to its log probability."""
    return f'{{"token":{one_line(_text(raw))},"bytes":{one_line(list(raw))},"logprob":'


def _text(raw: bytes) -> str:
    """A token's text.

    A piece of a character is written as OpenAI does, in escapes: U+FFFD would make all of them
    look alike.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
