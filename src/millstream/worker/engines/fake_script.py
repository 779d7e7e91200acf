"""The fake engine's tokenizer and what it says: pure functions of the prompt and the seed."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

from millstream.shared.errors import InvalidRequest
from millstream.shared.schemas import Message
from millstream.worker.engines.base import TokenLogprobs

DIRECTIVE = "@fake "
DEFAULT_TOKENS = 64

_TEXT = b"\x01"
_CONTROL = b"\x02"
# Long words and spaces are cut, so that counts stay plausible for text without spaces.
_WORD = re.compile(r"\s{0,16}\S{1,32}|\s{1,32}")
VOCABULARY = 2**57
"""Ids that a caller may name are below it: of up to seven bytes. The engine's own are longer."""
# Ids travel as decimal numbers, and Python reads no more than 4300 digits: 1785 bytes.
_LONGEST_TOKEN = 1024

# Neither words nor order may change: workers of two versions can share a task.
_WORDS = """
    a all and any as at be big blue book bread but by can city clear cold come day deep do door
    each early end far few field find fire fish for from garden give go good green grow hand he
    high hill home house how if in into it just keep kind know lake land late leaf left light like
    line long look made make many map may mill moon more most mother mountain move much near new
    night no not now of old on one or out over own path place rain red river road round run sea
    see she short side sky small snow so some soon south star still stone stream summer sun than
    that the then there they this time to tree turn two under up very wall warm was water way we
    well west wheel when where which white wide wind winter with wood word work year yes
""".split()  # noqa: SIM905 - a hundred quotes more help nobody


class FakeTokenizer:
    """A tokenizer without a vocabulary: an id is its token's bytes, read as a number.

    The first byte says what it is: 1 a piece of text, 2 a mark of the chat's form, which has no
    text. So any text and any broken piece of UTF-8 can be a token, nothing a user writes can become
    a mark, and ids mean the same to every process.
    """

    def encode(self, text: str) -> list[int]:
        """Split into words, each with the space before it."""
        words = _WORD.findall(text)
        ids = {word: text_id(word.encode(errors="replace")) for word in set(words)}
        return [ids[word] for word in words]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """A mark for each message's role and then its text; at the end the assistant's mark."""
        ids: list[int] = []
        for message in messages:
            ids.append(_control_id(message.role))
            ids += self.encode(message.content)
        ids.append(_control_id("assistant"))
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Join the bytes of all pieces of text."""
        pieces = {token_id: self.text_bytes(token_id) for token_id in set(token_ids)}
        return b"".join([pieces[token_id] for token_id in token_ids]).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a piece of text; the name of a mark."""
        raw = _raw(token_id)
        return raw[1:] if raw[:1] == _TEXT else b"<|" + raw[1:] + b"|>"

    def text_bytes(self, token_id: int) -> bytes:
        """The bytes of a piece of text; a mark has none."""
        raw = _raw(token_id)
        return raw[1:] if raw[:1] == _TEXT else b""


def text_id(text: bytes) -> int:
    """The id of a piece of text, which need not be whole characters."""
    return int.from_bytes(_TEXT + text)


def is_token_id(token_id: int) -> bool:
    """Whether a number is the id of a token at all."""
    highest_byte = token_id >> max(0, token_id.bit_length() - 1) // 8 * 8
    return highest_byte in (_TEXT[0], _CONTROL[0])


def _control_id(role: str) -> int:
    return int.from_bytes(_CONTROL + role.encode(errors="replace"))


def _raw(token_id: int) -> bytes:
    return token_id.to_bytes((token_id.bit_length() + 7) // 8)


Count = Annotated[int, Meta(ge=0, le=10_000_000)]
Position = Annotated[int, Meta(ge=1, le=10_000_000)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
Probability = Annotated[float, Meta(gt=0, le=1)]
Rate = Annotated[float, Meta(ge=0, le=1_000_000)]


class Directive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the line `@fake {json}` of a prompt asks for; tokens are counted from 1."""

    tokens: Count | None = None
    """How many; by default as many as there are texts, bytes or words to echo, else 64."""
    rate: Rate | None = None
    """Tokens per second; 0 is as fast as it goes, None the worker's setting."""
    texts: list[str] | None = None
    """The tokens' texts, again from the start when there are more tokens."""
    hex_bytes: list[str] | None = msgspec.field(name="bytes", default=None)
    """The tokens' bytes in hexadecimal, likewise."""
    delay_s: Seconds = 0.0
    """How long each token of `delay_at` takes."""
    delay_at: tuple[Position, ...] = (1,)
    """Before which tokens the task stands still; one more than `tokens`: before the end."""
    crash_at: Position | None = None
    """Before which token the process dies; one more than `tokens`: before the end."""
    hang_at: Position | None = None
    """Before which token the engine's thread blocks for ever."""
    die_at: Position | None = None
    """Before which token the engine's thread ends by an error of its own."""
    error_at: Position | None = None
    """In place of which token the request ends with an error."""
    echo: bool = False
    """Whether the prompt without this line comes back."""
    probs: list[Probability] | None = None
    """How likely the tokens are, again from the start when there are more tokens."""


_decode_directive = msgspec.json.Decoder(Directive).decode


@dataclass(frozen=True, slots=True)
class Script:
    """What one request will say."""

    directive: Directive
    tokens: int
    """How many tokens there are, over all attempts."""
    token_at: Callable[[int], int]
    """The id of the token at a position, counted from 0."""
    key: bytes
    """What all that is made up depends on: prompt and seed."""

    def logprobs_at(self, position: int, count: int) -> TokenLogprobs:
        """How likely the token at a position is, and `count` at its place, itself the first."""
        probs = self.directive.probs
        number = _number(self.key, position)
        made_up = -(number % 3_000_000) / 1_000_000  # probabilities from 1 down to 0.05
        logprob = math.log(probs[position % len(probs)]) if probs else made_up
        top = [(self.token_at(position), logprob)]
        at = number
        while len(top) < count:
            at += 1
            token_id = _NEXT_WORDS[at % len(_WORDS)]
            if token_id != top[0][0]:
                top.append((token_id, top[-1][1] - 0.25))
        return TokenLogprobs(logprob, tuple(top[:count]))


def read_script(prompt_ids: Sequence[int], seed: int | None) -> Script:
    """Find out what to say.

    Raises:
        InvalidRequest: the prompt has a directive that cannot be understood.
    """
    directive, rest = _find_directive(_last_user_text(prompt_ids))
    pieces = _pieces(directive, rest)
    key = _key(prompt_ids, seed or 0)
    if pieces is None:
        tokens = DEFAULT_TOKENS if directive.tokens is None else directive.tokens
        return Script(directive, tokens, lambda position: _word(key, position), key)
    tokens = len(pieces) if directive.tokens is None or not pieces else directive.tokens
    return Script(directive, tokens, lambda position: pieces[position % len(pieces)], key)


def _key(prompt_ids: Sequence[int], seed: int) -> bytes:
    digest = blake2b(str(seed).encode(), digest_size=64)
    raws = {token_id: _raw(token_id) for token_id in set(prompt_ids)}
    framed = {token_id: len(raw).to_bytes(8) + raw for token_id, raw in raws.items()}
    digest.update(b"".join([framed[token_id] for token_id in prompt_ids]))
    return digest.digest()


def _number(key: bytes, position: int) -> int:
    """64 bits by a hash of prompt, seed and position."""
    return int.from_bytes(blake2b(position.to_bytes(8), key=key, digest_size=8).digest())


def _word(key: bytes, position: int) -> int:
    return (_NEXT_WORDS if position else _FIRST_WORDS)[_number(key, position) % len(_WORDS)]


_FIRST_WORDS = [text_id(word.encode()) for word in _WORDS]
_NEXT_WORDS = [text_id(f" {word}".encode()) for word in _WORDS]


def _last_user_text(prompt_ids: Sequence[int]) -> str:
    """The last user message of a chat; all of a plain prompt."""
    controls = {token_id for token_id in set(prompt_ids) if _raw(token_id)[:1] == _CONTROL}
    marks = [at for at, token_id in enumerate(prompt_ids) if token_id in controls]
    if not marks:
        return FakeTokenizer().decode(prompt_ids)
    user = _control_id("user")
    for begin, end in reversed(list(zip(marks, [*marks[1:], len(prompt_ids)], strict=True))):
        if prompt_ids[begin] == user:
            return FakeTokenizer().decode(prompt_ids[begin + 1 : end])
    return ""


def _find_directive(text: str) -> tuple[Directive, str]:
    """The directive of a text, and the text without its line."""
    lines = text.split("\n")
    found = [number for number, line in enumerate(lines) if line.startswith(DIRECTIVE)]
    if not found:
        return Directive(), text
    if len(found) > 1:
        raise _invalid("there is more than one such line")
    try:
        directive = _decode_directive(lines.pop(found[0])[len(DIRECTIVE) :])
    except (ValueError, RecursionError) as error:
        raise _invalid(str(error)) from error
    if directive.rate is not None and 0 < directive.rate < 0.001:
        raise _invalid("`rate` must be 0 or at least 0.001")
    return directive, "\n".join(lines)


def _pieces(directive: Directive, rest: str) -> list[int] | None:
    """The tokens that the directive spells out, if it does."""
    given = [directive.texts is not None, directive.hex_bytes is not None, directive.echo]
    if sum(given) > 1:
        raise _invalid("only one of `texts`, `bytes` and `echo` can be given")
    if directive.echo:
        return FakeTokenizer().encode(rest)
    if directive.texts is not None:
        pieces = [text.encode(errors="replace") for text in directive.texts]
    elif directive.hex_bytes is not None:
        try:
            pieces = [bytes.fromhex(piece) for piece in directive.hex_bytes]
        except ValueError as error:
            raise _invalid(f"`bytes` must be hexadecimal: {error}") from error
    else:
        return None
    if any(len(piece) > _LONGEST_TOKEN for piece in pieces):
        raise _invalid(f"a token can have {_LONGEST_TOKEN} bytes at the most")
    return [text_id(piece) for piece in pieces]


def _invalid(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The @fake line cannot be used: {reason}.", param="prompt")
