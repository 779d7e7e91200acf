"""How the transformers engine fails, and stops: told once, in bounded time, without a word."""

import asyncio
import threading
import time

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.faults import busy
from tests.support.transformers_running import started
from tests.support.transformers_tiny import write_tiny_model

from millstream.shared.errors import SettingsError
from millstream.worker.engines.base import EngineSettings
from millstream.worker.engines.registry import create_engine
from millstream.worker.engines.transformers_engine import TransformersEngine

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), eos=None))


async def test_the_registry_makes_it(folder):
    engine = create_engine("transformers", EngineSettings(model="tiny", source=folder))
    assert isinstance(engine, TransformersEngine)
    assert engine.health().active == 0
    await engine.stop()


async def test_a_source_that_cannot_be_loaded(tmp_path):
    with pytest.raises(SettingsError):
        async with started(tmp_path):
            pass


async def test_a_model_that_cannot_run_in_batches(tmp_path):
    folder = write_tiny_model(tmp_path, num_attention_heads=4)
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(
        MambaConfig(vocab_size=260, hidden_size=32, num_hidden_layers=1)
    ).save_pretrained(folder)
    with pytest.raises(SettingsError, match="cannot run in batches"):
        async with started(folder):
            pass


@pytest.mark.parametrize("failure", [RuntimeError("out of order"), SystemExit(3)])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_failing_step_fails_every_request_once(folder, monkeypatch, failure, capfd):
    async with started(folder) as running:

        def fail() -> None:
            raise failure

        for i in range(3):
            running.submit(f"r{i}", max_new_tokens=400)
        await running.until(lambda: running.tokens("r2"))
        running.manager._generation_step = fail
        running.submit("late", max_new_tokens=400)
        await running.finished("r0", "r1", "r2", "late")
        for name in ("r0", "r1", "r2", "late"):
            assert running.finish(name).finish == "error"
            assert running.finish(name).error
        health = running.engine.health()
        assert health.active == 0
        assert health.fatal
        if isinstance(failure, RuntimeError):
            assert "out of order" in health.fatal
        running.submit("after")
        await running.finished("after")
        assert running.finish("after").finish == "error"
        running.engine.cancel("after")
    assert capfd.readouterr() == ("", "")


async def test_a_dead_thread_is_seen_without_any_request(folder):
    async with started(folder) as running:

        def fail() -> bool:
            raise MemoryError("no more")

        running.manager.batch_processor.prepare_next_batch = fail
        await running.until(lambda: running.engine.health().fatal is not None)
        assert "no more" in running.engine.health().fatal


async def test_stop_ends_everything_in_silence(folder):
    async with started(folder) as running:
        for i in range(4):
            running.submit(f"r{i}", max_new_tokens=500)
        await running.until(lambda: running.tokens("r3"))
        began = time.monotonic()
        await running.engine.stop()
        assert time.monotonic() - began < 5 * busy()
        delivered = len(running.steps)
        assert running.engine.health().active == 0
        assert "generation" not in {thread.name for thread in threading.enumerate()}
        await asyncio.sleep(0.1)
        assert len(running.steps) == delivered
        await running.engine.stop()  # once more is harmless


async def test_a_hanging_step_is_left_behind(folder, monkeypatch):
    from millstream.worker.engines import transformers_engine

    monkeypatch.setattr(transformers_engine, "_STOP_S", 0.2)
    release = threading.Event()
    async with started(folder) as running:
        running.manager._generation_step = lambda: release.wait(30)
        running.submit("a")
        await asyncio.sleep(0.1)
        steps = running.engine.health().steps
        assert running.engine.health().active == 1
        began = time.monotonic()
        await running.engine.stop()
        assert time.monotonic() - began < 3
        assert running.engine.health().steps in (0, steps)
    release.set()


async def test_use_before_start_is_a_fault_of_ours():
    engine = TransformersEngine(EngineSettings(model="tiny", source="nowhere"))
    with pytest.raises(RuntimeError):
        _ = engine.tokenizer
    assert engine.health().fatal is None
    engine.cancel("nobody")
    await engine.stop()
