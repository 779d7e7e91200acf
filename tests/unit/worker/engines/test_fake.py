"""The fake engine says exactly what it is told, when it is told, and fails as it is told."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from millstream.shared.errors import InvalidRequest, SettingsError
from millstream.shared.schemas import Message
from millstream.worker.engines import fake
from millstream.worker.engines.base import (
    EngineHealth,
    EngineInfo,
    EngineSettings,
    GenerationRequest,
    StepOutput,
)
from millstream.worker.engines.fake import FakeEngine
from millstream.worker.engines.fake_script import FakeTokenizer, is_token_id, text_id
from millstream.worker.engines.registry import create_engine

TOKENIZER = FakeTokenizer()
SETTINGS = EngineSettings(model="fake", source="fake")


def directive(**fields: Any) -> str:
    return f"@fake {json.dumps(fields)}"


def request(
    prompt: str | Sequence[Message],
    request_id: str = "task:1",
    *,
    emitted: Sequence[int] = (),
    max_new_tokens: int = 1_000,
    seed: int | None = None,
    fallback_seed: int = 1,
) -> GenerationRequest:
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else TOKENIZER.encode_chat(prompt)
    return GenerationRequest(
        request_id=request_id,
        token_ids=[*ids, *emitted],
        prompt_length=len(ids),
        max_new_tokens=max_new_tokens,
        seed=seed,
        fallback_seed=fallback_seed,
    )


class Running:
    """A started engine, what it delivered, and waits for it."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.steps: list[list[StepOutput]] = []
        self.info: EngineInfo
        self._news = asyncio.Event()

    async def start(self) -> None:
        self.info = await self.engine.start(self._on_step)

    def _on_step(self, outputs: list[StepOutput]) -> None:
        self.steps.append(outputs)
        self._news.set()

    def outputs(self, request_id: str = "task:1") -> list[StepOutput]:
        return [each for step in self.steps for each in step if each.request_id == request_id]

    def token_ids(self, request_id: str = "task:1") -> list[int]:
        return [each for output in self.outputs(request_id) for each in output.token_ids]

    def finish(self, request_id: str = "task:1") -> str | None:
        outputs = self.outputs(request_id)
        return outputs[-1].finish if outputs else None

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def run(self, generation: GenerationRequest) -> tuple[list[int], str | None]:
        """Run one request to its end; its tokens and how it ended."""
        self.engine.submit(generation)
        await self.until(lambda: self.finish(generation.request_id))
        return self.token_ids(generation.request_id), self.finish(generation.request_id)

    async def say(self, prompt: str | Sequence[Message]) -> tuple[list[str], str | None]:
        """Run a prompt to its end; the texts of its tokens and how it ended."""
        ids, finish = await self.run(request(prompt))
        return [TOKENIZER.decode([each]) for each in ids], finish


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    running = Running(FakeEngine(SETTINGS))
    await running.start()
    yield running
    await running.engine.stop()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "fake-engine"]


def wait_for(condition: Callable[[], bool]) -> None:
    """Block until another thread has made it true."""
    deadline = time.monotonic() + 4
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


class TestRegistry:
    def test_makes_the_fake(self) -> None:
        assert isinstance(create_engine("fake", SETTINGS), FakeEngine)

    def test_knows_no_other_name(self) -> None:
        with pytest.raises(
            SettingsError, match="There is no engine 'vllm'; choose one of: transformers, fake"
        ):
            create_engine("vllm", SETTINGS)

    def test_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # None in sys.modules makes the import fail as for a package that is not there.
        name = "millstream.worker.engines.transformers_engine"
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(SettingsError, match=r"pip install 'millstream\[worker\]'"):
            create_engine("transformers", SETTINGS)


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


class TestRequests:
    @pytest.mark.parametrize(
        ("prompt_length", "token_ids"),
        [(0, []), (0, [text_id(b"a")]), (2, [text_id(b"a")]), (1, [0]), (1, [-5]), (1, [3])],
    )
    def test_ids_that_cannot_be(self, prompt_length: int, token_ids: list[int]) -> None:
        generation = GenerationRequest(
            request_id="task:1",
            token_ids=token_ids,
            prompt_length=prompt_length,
            max_new_tokens=1,
            seed=None,
            fallback_seed=1,
        )
        with pytest.raises(InvalidRequest) as caught:
            FakeEngine(SETTINGS).submit(generation)
        assert caught.value.param == "prompt"

    def test_too_long(self) -> None:
        with pytest.raises(InvalidRequest) as caught:
            FakeEngine(SETTINGS).submit(request("a", emitted=[text_id(b"a")] * 999_999))
        assert caught.value.code == "context_length_exceeded"

    def test_no_budget(self) -> None:
        with pytest.raises(InvalidRequest) as caught:
            FakeEngine(SETTINGS).submit(request("a", max_new_tokens=0))
        assert caught.value.param == "max_tokens"

    async def test_an_id_runs_once_at_a_time(self, running: Running) -> None:
        running.engine.submit(request("a"))
        with pytest.raises(InvalidRequest, match="Request task:1 is running already"):
            running.engine.submit(request("a"))
        await running.until(running.finish)
        running.engine.submit(request("a"))
        await running.until(lambda: len(running.token_ids()) == 128)

    async def test_each_step_brings_one_token_a_request(self, running: Running) -> None:
        for name in ("a", "b", "c"):
            running.engine.submit(request("Hello", name))
        await running.until(lambda: all(map(running.finish, "abc")))
        for step in running.steps:
            names = [output.request_id for output in step]
            assert len(names) == len(set(names))
            assert all(len(output.token_ids) <= 1 for output in step)
        assert running.engine.health().active == 0

    async def test_info(self, running: Running) -> None:
        assert running.info == EngineInfo(
            vocabulary_size=2**57, context_length=1_000_000, cache_tokens=0, numerics="fake"
        )


class TestRate:
    async def test_is_kept_on_average(self, running: Running) -> None:
        begin = time.monotonic()
        ids, _ = await running.run(request(directive(tokens=100, rate=400)))
        # The first token comes at once, the end takes one interval as a token does.
        assert 0.25 <= time.monotonic() - begin < 1.25
        assert len(ids) == 100

    async def test_is_the_settings_by_default(self) -> None:
        running = Running(FakeEngine(EngineSettings(model="m", source="m", fake_tokens_per_s=200)))
        await running.start()
        begin = time.monotonic()
        await running.run(request(directive(tokens=20), "slow"))
        assert time.monotonic() - begin >= 0.1
        running.engine.submit(request(directive(tokens=10_000, rate=0), "fast"))
        await running.until(lambda: len(running.token_ids("fast")) >= 1_000)
        await running.engine.stop()

    async def test_a_delay_comes_before_the_first_token(self, running: Running) -> None:
        begin = time.monotonic()
        await running.run(request(directive(texts=["a"], delay_s=0.2)))
        assert time.monotonic() - begin >= 0.2

    @pytest.mark.parametrize("at", [2, 4])
    async def test_a_delay_can_come_before_any_token_and_the_end(
        self, running: Running, at: int
    ) -> None:
        held = request(directive(texts=["a", "b", "c"], delay_s=0.4, delay_at=[at]))
        running.engine.submit(held)
        await running.until(lambda: len(running.outputs()) == at - 1)
        begin = time.monotonic()
        await running.until(lambda: len(running.outputs()) >= at)
        assert time.monotonic() - begin >= 0.3

    @pytest.mark.parametrize("at", [[1], [2], [1, 2]])
    async def test_a_task_taken_over_has_had_its_delay(
        self, running: Running, at: list[int]
    ) -> None:
        resumed = request(
            directive(texts=["a", "b"], delay_s=60, delay_at=at), emitted=[text_id(b"a")]
        )
        assert await running.run(resumed) == ([text_id(b"b")], "stop")

    async def test_steps_go_on_while_all_wait(self, running: Running) -> None:
        running.engine.submit(request(directive(delay_s=60)))
        await asyncio.to_thread(wait_for, lambda: running.engine.health().steps >= 3)
        assert running.engine.health().active == 1
        assert running.steps == []

    async def test_one_that_waits_does_not_hold_up_others(self, running: Running) -> None:
        running.engine.submit(request(directive(delay_s=60), "waits"))
        ids, _ = await running.run(request("Hello", "goes"))
        assert len(ids) == 64
        assert running.outputs("waits") == []

    async def test_a_blocked_loop_holds_the_engine_up(self, running: Running) -> None:
        running.engine.submit(request(directive(tokens=10_000_000), max_new_tokens=10_000_000))
        wait_for(lambda: running.engine.health().steps >= 4)
        threading.Event().wait(0.1)  # blocks the loop; a flood would be thousands of steps
        assert running.engine.health().steps == 4
        await running.until(lambda: len(running.token_ids()) >= 100)


class TestCancel:
    async def test_nothing_arrives_after_it(self, running: Running) -> None:
        running.engine.submit(request(directive(tokens=1_000_000), "a", max_new_tokens=1_000_000))
        await running.until(lambda: running.outputs("a"))
        running.engine.cancel("a")
        seen = len(running.outputs("a"))
        assert running.engine.health().active == 0
        await running.run(request("Hello", "b"))
        assert len(running.outputs("a")) == seen

    async def test_steps_on_their_way_are_not_taken_for_a_new_request(
        self, running: Running
    ) -> None:
        running.engine.submit(request(directive(texts=["old"] * 50), "a"))
        # Blocks the loop, so that four steps wait for it.
        wait_for(lambda: running.engine.health().steps >= 4)
        running.engine.cancel("a")
        ids, _ = await running.run(request(directive(texts=["new"]), "a"))
        assert ids == [text_id(b"new")]

    async def test_of_one_that_waits(self, running: Running) -> None:
        running.engine.submit(request(directive(delay_s=60)))
        running.engine.cancel("task:1")
        assert running.engine.health().active == 0
        assert (await running.run(request(directive(texts=["a"]))))[0] == [text_id(b"a")]

    async def test_of_an_unknown_one(self, running: Running) -> None:
        running.engine.cancel("nobody")
        assert running.engine.health().active == 0


class TestStop:
    async def test_ends_all_without_further_outputs(self, running: Running) -> None:
        running.engine.submit(request(directive(tokens=1_000_000), max_new_tokens=1_000_000))
        await running.until(running.outputs)
        await running.engine.stop()
        seen = len(running.steps)
        await asyncio.sleep(0)  # what the loop still has queued runs now
        assert len(running.steps) == seen
        assert running.engine.health().active == 0
        assert threads() == []

    async def test_a_callback_that_raises_does_not_hold_the_engine_up(self) -> None:
        loop = asyncio.get_running_loop()
        caught: list[Any] = []
        loop.set_exception_handler(lambda _, context: caught.append(context["exception"]))
        ended = asyncio.Event()

        def on_step(outputs: list[StepOutput]) -> None:
            if outputs[0].finish is not None:
                ended.set()
            raise RuntimeError(str(len(caught)))

        engine = FakeEngine(SETTINGS)
        await engine.start(on_step)
        engine.submit(request(directive(tokens=9)))
        async with asyncio.timeout(5):
            await ended.wait()
        await engine.stop()
        assert [str(error) for error in caught] == [str(n) for n in range(10)]

    async def test_twice_and_without_a_start(self, running: Running) -> None:
        await running.engine.stop()
        await running.engine.stop()
        await FakeEngine(SETTINGS).stop()


class TestFaults:
    async def test_error_ends_one_request_only(self, running: Running) -> None:
        running.engine.submit(request(directive(texts=["a", "b", "c"], error_at=3), "bad"))
        ids, finish = await running.run(request("Hello", "good"))
        assert running.outputs("bad") == [
            StepOutput("bad", (text_id(b"a"),)),
            StepOutput("bad", (text_id(b"b"),)),
            StepOutput(
                "bad",
                finish="error",
                error="the fake engine failed at token 3, as it was told",
            ),
        ]
        assert (len(ids), finish) == (64, "stop")
        assert running.engine.health().fatal is None

    async def test_error_comes_at_each_attempt(self, running: Running) -> None:
        resumed = request(directive(tokens=9, error_at=2), emitted=[text_id(b"a")])
        assert await running.run(resumed) == ([], "error")

    async def test_hang_stops_every_step_until_the_stop(self, running: Running) -> None:
        running.engine.submit(request(directive(hang_at=3), "bad"))
        await running.until(lambda: len(running.token_ids("bad")) == 2)
        running.engine.submit(request("Hello", "held up"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await running.until(lambda: running.outputs("held up"))
        assert running.engine.health() == EngineHealth(active=2, steps=2)
        running.engine.cancel("held up")
        assert running.engine.health().active == 1
        await running.engine.stop()
        assert threads() == []

    async def test_a_thread_that_is_told_to_die_is_fatal(self, running: Running) -> None:
        running.engine.submit(request(directive(die_at=3)))
        await running.until(lambda: len(running.token_ids()) == 2)
        await asyncio.to_thread(wait_for, lambda: not threads())
        assert running.engine.health() == EngineHealth(
            active=1,
            steps=2,
            fatal="the engine thread died: RuntimeError('it was told to die at token 3')",
        )

    def test_a_dead_thread_is_fatal(self) -> None:
        engine = FakeEngine(SETTINGS)
        loop = asyncio.new_event_loop()
        loop.run_until_complete(engine.start(lambda _: None))
        loop.close()
        engine.submit(request("Hello"))
        wait_for(lambda: not threads())
        assert engine.health() == EngineHealth(
            active=1,
            steps=1,
            fatal="the engine thread died: RuntimeError('Event loop is closed')",
        )


CRASHING = """
import asyncio, sys, time
from millstream.worker.engines.base import EngineSettings, GenerationRequest
from millstream.worker.engines.fake import FakeEngine

async def main():
    engine = FakeEngine(EngineSettings(model="fake", source="fake"))
    def on_step(outputs):
        time.sleep(float(sys.argv[3]))
        for output in outputs:
            print(engine.tokenizer.decode(output.token_ids), output.finish, flush=True)
    await engine.start(on_step)
    ids = engine.tokenizer.encode(sys.argv[1])
    emitted = engine.tokenizer.encode(sys.argv[2])
    engine.submit(GenerationRequest(request_id="task:1", token_ids=[*ids, *emitted],
        prompt_length=len(ids), max_new_tokens=100, seed=None, fallback_seed=1))
    await asyncio.sleep(5)

asyncio.run(main())
"""


class TestCrash:
    @pytest.mark.parametrize(
        ("crash_at", "emitted", "busy_s", "printed"),
        [
            pytest.param(1, "", 0, "", id="before the first"),
            pytest.param(3, "", 0, "a None\nb None\n", id="in the middle"),
            pytest.param(4, "", 0, "a None\nb None\nc None\n", id="before the end"),
            pytest.param(3, "a", 0, "b None\n", id="at the second attempt"),
            pytest.param(3, "a b", 0, "", id="at the third attempt"),
            pytest.param(2, "", 0.2, "a None\n", id="with a busy loop"),
        ],
    )
    def test_comes_after_the_token_before_is_delivered(
        self, crash_at: int, emitted: str, busy_s: float, printed: str
    ) -> None:
        prompt = directive(texts=["a", "b", "c"], crash_at=crash_at)
        done = subprocess.run(
            [sys.executable, "-c", CRASHING, prompt, emitted, str(busy_s)],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert (done.stdout, done.stderr, done.returncode) == (printed, "", 70)
