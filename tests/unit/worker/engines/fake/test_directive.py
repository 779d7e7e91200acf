"""The fake engine says exactly what a prompt's `@fake` line tells it to."""

import pytest
from hypothesis import given, strategies as st
from tests.support.fake_running import SETTINGS, TOKENIZER, Running, directive, request

from millstream.shared.errors import InvalidRequest
from millstream.shared.schemas import Message
from millstream.worker.engines.base import EngineHealth
from millstream.worker.engines.fake import FakeEngine
from millstream.worker.engines.fake_script import text_id


class TestDirective:
    async def test_texts(self, running: Running) -> None:
        texts = ["he", "llo", " wor", "ld"]
        assert await running.say(directive(texts=texts)) == (texts, "stop")

    async def test_texts_start_again(self, running: Running) -> None:
        said = await running.say(directive(texts=["a", "b"], tokens=5))
        assert said == (["a", "b", "a", "b", "a"], "stop")

    async def test_texts_are_cut(self, running: Running) -> None:
        assert await running.say(directive(texts=["a", "b"], tokens=1)) == (["a"], "stop")

    async def test_bytes(self, running: Running) -> None:
        ids, finish = await running.run(request(directive(bytes=["f0", "9f", "98", "80"])))
        assert ids == [text_id(each) for each in (b"\xf0", b"\x9f", b"\x98", b"\x80")]
        assert TOKENIZER.decode(ids) == "😀"
        assert finish == "stop"

    async def test_echo_gives_the_prompt_without_the_line(self, running: Running) -> None:
        prompt = f"Say  this\n{directive(echo=True)}\nand 你好"
        assert await running.say(prompt) == (["Say", "  this", "\nand", " 你好"], "stop")

    async def test_echo_of_nothing(self, running: Running) -> None:
        assert await running.say(directive(echo=True, tokens=5)) == ([], "stop")

    async def test_is_read_from_the_last_user_message(self, running: Running) -> None:
        chat = [
            Message("system", directive(texts=["system"])),
            Message("user", directive(texts=["first"])),
            Message("assistant", directive(texts=["assistant"])),
            Message("user", f"Hi\n{directive(texts=['last'])}\nthere"),
            Message("assistant", directive(texts=["prefill"])),
        ]
        assert await running.say(chat) == (["last"], "stop")

    @pytest.mark.parametrize(
        "chat",
        [
            pytest.param([Message("system", directive(tokens=1))], id="no user"),
            pytest.param(
                [Message("user", directive(tokens=1)), Message("user", "no line")], id="last user"
            ),
        ],
    )
    async def test_is_not_looked_for_in_other_messages(
        self, running: Running, chat: list[Message]
    ) -> None:
        said, _ = await running.say(chat)
        assert len(said) == 64

    @pytest.mark.parametrize(
        "line",
        [
            pytest.param(f" {directive(tokens=1)}", id="not at the start of a line"),
            pytest.param('@fake{"tokens":1}', id="no space"),
            pytest.param("@faker x", id="another word"),
        ],
    )
    async def test_other_lines_are_text(self, running: Running, line: str) -> None:
        said, _ = await running.say(line)
        assert len(said) == 64

    async def test_a_carriage_return_may_end_the_line(self, running: Running) -> None:
        assert await running.say(f"Hi\r\n{directive(texts=['a'])}\r\n") == (["a"], "stop")

    @pytest.mark.parametrize(
        "line",
        [
            "@fake ",
            "@fake please",
            "@fake []",
            "@fake 5",
            "@fake {",
            '@fake {"token": 1}',
            '@fake {"tokens": true}',
            '@fake {"tokens": "5"}',
            '@fake {"tokens": 1.5}',
            '@fake {"tokens": -1}',
            '@fake {"tokens": 10000001}',
            '@fake {"tokens": 1' + "0" * 5_000 + "}",
            '@fake {"tokens": NaN}',
            '@fake {"rate": NaN}',
            '@fake {"rate": 1e400}',
            '@fake {"rate": -1}',
            '@fake {"rate": 1e-300}',
            '@fake {"rate": true}',
            '@fake {"delay_s": -0.1}',
            '@fake {"delay_s": Infinity}',
            '@fake {"delay_at": 2}',
            '@fake {"delay_at": [0]}',
            '@fake {"die_at": 0}',
            '@fake {"texts": "abc"}',
            '@fake {"texts": [1]}',
            '@fake {"texts": ["\\ud800"]}',
            '@fake {"texts": ["' + "a" * 1_025 + '"]}',
            '@fake {"bytes": ["f"]}',
            '@fake {"bytes": ["zz"]}',
            '@fake {"bytes": ["é"]}',
            '@fake {"texts": ["a"], "bytes": ["00"]}',
            '@fake {"texts": ["a"], "echo": true}',
            '@fake {"echo": 1}',
            '@fake {"crash_at": 0}',
            '@fake {"hang_at": false}',
            '@fake {"error_at": "1"}',
            "@fake " + "[" * 10_000,
            '@fake {"tokens": 1}\n@fake {"tokens": 1}',
        ],
        ids=lambda line: line[:40],
    )
    async def test_what_cannot_be_understood_is_refused(self, running: Running, line: str) -> None:
        with pytest.raises(InvalidRequest, match="The @fake line cannot be used: ") as caught:
            running.engine.submit(request(line))
        assert caught.value.param == "prompt"
        assert running.engine.health() == EngineHealth(active=0, steps=0)

    @given(st.text())
    def test_anything_else_is_refused_too(self, text: str) -> None:
        engine = FakeEngine(SETTINGS)
        with pytest.raises(InvalidRequest):
            engine.submit(request(f"@fake x{text}"))
