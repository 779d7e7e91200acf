"""When the fake engine says it: its rate, its delays, and a loop that does not keep up."""

import asyncio
import threading
import time

import pytest
from tests.support.fake_running import Running, directive, request, wait_for

from millstream.worker.engines.base import EngineSettings
from millstream.worker.engines.fake import FakeEngine
from millstream.worker.engines.fake_script import text_id


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
