"""What the fake engine takes, runs side by side, cancels and ends when it is stopped."""

import asyncio
from typing import Any

import pytest
from tests.support.fake_running import (
    SETTINGS,
    Running,
    directive,
    request,
    threads,
    wait_for,
)

from millstream.shared.errors import InvalidRequest
from millstream.worker.engines.base import EngineInfo, GenerationRequest, StepOutput
from millstream.worker.engines.fake import FakeEngine
from millstream.worker.engines.fake_script import text_id


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
