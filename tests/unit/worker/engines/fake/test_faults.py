"""The fake engine fails as it is told: an error, a hang, a dead thread, a crash."""

import asyncio
import subprocess
import sys

import pytest
from tests.support.fake_running import (
    SETTINGS,
    Running,
    directive,
    request,
    threads,
    wait_for,
)

from millstream.worker.engines.base import EngineHealth, StepOutput
from millstream.worker.engines.fake import FakeEngine
from millstream.worker.engines.fake_script import text_id


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
