# pyright: basic
"""The model's tokenizer: its chat template, and a user's text that stays text."""

import copy
import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from millstream.shared.errors import InvalidRequest
from millstream.shared.schemas import Message

# The name of a byte in vocabularies with byte fallback (SentencePiece).
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's way to write bytes as characters that can be seen (`bytes_to_unicode`), undone."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {
        chr(256 + at): byte for at, byte in enumerate(hidden)
    }


_BYTES = _byte_of_character()


class TransformersTokenizer:
    """A Hugging Face tokenizer behind the `Tokenizer` protocol.

    Nothing here changes the tokenizers once they are made, so one thread may encode while another
    decodes: setting an option on a `tokenizers.Tokenizer` that is in use elsewhere raises "Already
    borrowed". Hence a copy of its own that takes control tokens for text.

    Args:
        tokenizer: A `PreTrainedTokenizerBase`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            # A tokenizer.json may ask to cut prompts at the length its model was trained with.
            self._backend.no_truncation()
            self._backend.no_padding()
        self.text_bytes = functools.cache(self._text_bytes) if self._joins_bytes() else None
        """What one token adds to a text's bytes; None where texts are more than these."""
        names = sorted(tokenizer.added_tokens_encoder, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, names))) if names else None

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Render messages by the model's chat template, ending where the answer begins.

        Without a template each message is `<role>`, a line break, the content, a line break.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        if self._tokenizer.chat_template is None:
            turns = "".join(f"<{message.role}>\n{message.content}\n" for message in messages)
            return self.encode(turns + "<assistant>\n")
        # Only a conversation that holds the name of a control token takes the way around: it cuts
        # the text into pieces there, and the ids of ordinary text must be those the model knows.
        has_control = self._control is not None and any(
            self._control.search(message.content) for message in messages
        )
        try:
            encoded = self._tokenizer.apply_chat_template(
                [{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=True,
                return_dict=False,
                sanitize_control_tokens=has_control,
            )
        except (TemplateError, ValueError, TypeError, LookupError) as error:
            raise InvalidRequest(
                f"The model's chat template does not take these messages: {_first_line(error)}",
                param="messages",
            ) from error
        return list(encoded)

    def encode(self, text: str) -> list[int]:
        """Encode plain text as a prompt; names of control tokens in it are text.

        Raises:
            InvalidRequest: the tokenizer does not take the text.
        """
        try:
            if self._backend is not None:
                return list(self._literal.encode(text).ids)
            return list(self._tokenizer.encode(text, split_special_tokens=True))
        except (ValueError, TypeError) as error:
            raise InvalidRequest(
                f"The model's tokenizer does not take this text: {_first_line(error)}",
                param="prompt",
            ) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode ids, leaving out special tokens; bytes that are not UTF-8 become U+FFFD."""
        if self._backend is not None:
            # What `PreTrainedTokenizerBase.decode` comes down to, in less than half its time.
            return self._backend.decode(list(token_ids), skip_special_tokens=True)
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, which need not be whole characters; a special one its name."""
        name: Any = self._tokenizer.convert_ids_to_tokens(token_id)
        if name is None:
            return b""  # the model has more ids than its tokenizer
        if self._backend is None or token_id in self._added:
            return str(name).encode()
        if self._byte_level:
            return _spelled(name)
        if match := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(match.group(1), 16)])
        return name.replace("\u2581", " ").encode()

    def _joins_bytes(self) -> bool:
        """Whether the decoder is GPT-2's and no other beside it."""
        decoder: Any = getattr(self._backend, "decoder", None)
        return decoder is not None and json.loads(decoder.__getstate__())["type"] == "ByteLevel"

    def _text_bytes(self, token_id: int) -> bytes:
        text = self.decode([token_id])
        if "\ufffd" not in text:
            return text.encode()
        # It is a piece of a character, or that character itself. The decoder reads the names of
        # added tokens as it reads all others.
        return _spelled(str(self._tokenizer.convert_ids_to_tokens(token_id)))

    @functools.cached_property
    def _added(self) -> frozenset[int]:
        """Tokens that are written as they are called."""
        return frozenset(self._tokenizer.added_tokens_decoder)

    @functools.cached_property
    def _byte_level(self) -> bool:
        """Whether names of tokens have a character for each byte (GPT-2's way)."""
        decoder: Any = getattr(self._backend, "decoder", None)
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    @functools.cached_property
    def _literal(self) -> Any:
        """The copy that takes control tokens for text; made when first needed, for its memory."""
        literal: Any = copy.deepcopy(self._backend)
        literal.encode_special_tokens = True
        return literal


def _spelled(name: str) -> bytes:
    """What a name stands for in a byte-level tokenizer; one that spells no bytes, itself."""
    if not _BYTES.keys() >= set(name):
        return name.encode()
    return bytes(_BYTES[character] for character in name)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
