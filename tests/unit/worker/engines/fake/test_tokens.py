"""What the fake engine says when it is not told what: its tokens, and the words of a prompt."""

import pytest
from hypothesis import given, strategies as st
from tests.support.fake_running import TOKENIZER, Running, directive, request

from millstream.shared.schemas import Message
from millstream.worker.engines import fake
from millstream.worker.engines.base import StepOutput
from millstream.worker.engines.fake_script import is_token_id, text_id


class TestTokenizer:
    @given(st.text())
    def test_decode_undoes_encode(self, text: str) -> None:
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text

    def test_splits_like_words(self) -> None:
        ids = TOKENIZER.encode("Hello big\n world ")
        assert [TOKENIZER.decode([each]) for each in ids] == ["Hello", " big", "\n world", " "]

    def test_broken_characters_can_be_tokens(self) -> None:
        ids = [text_id(piece) for piece in (b"\xf0\x9f", b"\x98\x80", b"\xff")]
        assert TOKENIZER.decode(ids) == "😀\ufffd"
        assert TOKENIZER.decode(ids[:1]) == "\ufffd"

    def test_marks_of_a_chat_have_no_text(self) -> None:
        ids = TOKENIZER.encode_chat([Message("system", "Be kind."), Message("user", "Hi")])
        assert len(ids) == 6
        assert [TOKENIZER.decode([each]) for each in ids] == ["", "Be", " kind.", "", "Hi", ""]

    def test_nothing_in_a_message_becomes_a_mark(self) -> None:
        text = "\x02user\x02assistant<|im_start|>"
        ids = TOKENIZER.encode_chat([Message("user", text)])
        assert TOKENIZER.decode(ids) == text

    def test_an_id_can_be_written_and_read_as_a_decimal_number(self) -> None:
        # Python refuses more than 4300 digits.
        longest = max(TOKENIZER.encode("😀" * 5_000))
        assert int(str(longest)) == longest

    @given(st.binary(max_size=40))
    def test_knows_its_ids(self, piece: bytes) -> None:
        assert is_token_id(text_id(piece))
        assert is_token_id(int.from_bytes(b"\x02" + piece))
        assert not is_token_id(int.from_bytes(b"\x03" + piece))
        assert not is_token_id(-text_id(piece))

    def test_zero_is_no_id(self) -> None:
        assert not is_token_id(0)


class TestWords:
    async def test_are_the_same_each_time(self, running: Running) -> None:
        first, finish = await running.run(request("Hello", "a"))
        second, _ = await running.run(request("Hello", "b", fallback_seed=2))
        assert first == second
        assert len(first) == 64
        assert finish == "stop"
        words = TOKENIZER.decode(first).split(" ")
        assert len(words) == 64
        assert all(word.isalpha() for word in words)
        assert len(set(words)) > 20

    async def test_depend_on_prompt_and_seed(self, running: Running) -> None:
        unseeded, _ = await running.run(request("Hello", "a"))
        zero, _ = await running.run(request("Hello", "b", seed=0))
        one, _ = await running.run(request("Hello", "c", seed=1))
        other, _ = await running.run(request("Hello!", "d"))
        assert unseeded == zero
        assert len({tuple(ids) for ids in (zero, one, other)}) == 3

    async def test_are_the_same_for_ever(self, running: Running) -> None:
        # Part of the contract between versions: a fleet is updated worker by worker.
        ids, _ = await running.run(request("Hello", max_new_tokens=6, seed=7))
        assert TOKENIZER.decode(ids) == "so home some one the day"

    async def test_go_on_after_any_token_as_if_undisturbed(self, running: Running) -> None:
        undisturbed, _ = await running.run(request("Hello", "all", seed=3))
        for count in range(65):
            running.engine.submit(
                request("Hello", f"from:{count}", emitted=undisturbed[:count], seed=3)
            )
        await running.until(lambda: all(running.finish(f"from:{n}") for n in range(65)))
        for count in range(65):
            assert running.token_ids(f"from:{count}") == undisturbed[count:]
            assert running.finish(f"from:{count}") == "stop"

    async def test_are_as_many_as_told(self, running: Running) -> None:
        ids, finish = await running.run(request(directive(tokens=3)))
        assert (len(ids), finish) == (3, "stop")
        assert [output.token_ids for output in running.outputs()] == [*((i,) for i in ids), ()]

    async def test_can_be_none(self, running: Running) -> None:
        assert await running.run(request(directive(tokens=0))) == ([], "stop")
        assert running.outputs() == [StepOutput("task:1", finish="stop")]

    async def test_end_with_the_budget(self, running: Running) -> None:
        ids, finish = await running.run(request(directive(tokens=3), max_new_tokens=3))
        assert (len(ids), finish) == (3, "length")
        assert running.outputs()[-1] == StepOutput("task:1", (ids[-1],), "length")

    async def test_end_with_the_context(
        self, running: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fake, "CONTEXT_LENGTH", 10)
        ids, finish = await running.run(request("one two three"))
        assert (len(ids), finish) == (7, "length")
