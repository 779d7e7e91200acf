"""The transformers engine on tiny models: what it refuses, how it ends, what it survives."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.transformers_tiny import write_tiny_model

from millstream.shared.errors import InvalidRequest, SettingsError
from millstream.worker.engines.base import (
    EngineInfo,
    EngineSettings,
    GenerationRequest,
    StepOutput,
)
from millstream.worker.engines.registry import create_engine
from millstream.worker.engines.transformers_engine import TransformersEngine

pytestmark = pytest.mark.timeout(120)

PROMPT = [10, 11, 12, 13, 14]


class Running:
    """A started engine and what it delivered."""

    def __init__(self, engine: TransformersEngine, source: str) -> None:
        self.engine = engine
        self.source = source
        self.info: EngineInfo
        self.steps: list[list[StepOutput]] = []
        self._moved = asyncio.Event()

    def on_step(self, outputs: list[StepOutput]) -> None:
        self.steps.append(outputs)
        self._moved.set()

    def submit(self, request_id: str, token_ids: Sequence[int] = PROMPT, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "prompt_length": len(token_ids),
            "max_new_tokens": 20,
            "seed": None,
            "fallback_seed": 1,
            "temperature": 0.0,
            **changes,
        }
        self.engine.submit(GenerationRequest(request_id=request_id, token_ids=token_ids, **fields))

    async def run(self, request_id: str, token_ids: Sequence[int] = PROMPT, **changes) -> list[int]:
        self.submit(request_id, token_ids, **changes)
        await self.finished(request_id)
        return self.tokens(request_id)

    def outputs(self, request_id: str) -> list[StepOutput]:
        return [o for step in self.steps for o in step if o.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token_id for o in self.outputs(request_id) for token_id in o.token_ids]

    def finish(self, request_id: str) -> StepOutput | None:
        ends = [o for o in self.outputs(request_id) if o.finish is not None]
        assert len(ends) <= 1
        return ends[0] if ends else None

    async def finished(self, *request_ids: str) -> None:
        await self.until(lambda: all(self.finish(name) for name in request_ids))

    async def until(self, condition, *, within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, self.engine.health()
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), 0.05)

    async def settle(self) -> None:
        """Wait until the generation thread has nothing left."""
        scheduler = self.manager.batch_processor.scheduler
        await self.until(
            lambda: not scheduler.has_pending_requests() and self.manager.input_queue.empty()
        )

    @property
    def manager(self) -> Any:
        return self.engine._manager

    def blocks_in_use(self) -> int:
        cache = self.manager.batch_processor.cache
        cache.evict_cached_blocks()
        cache.pool.try_to_free_sectors()
        assert all(not a.block_table for a in cache.cache_allocators.values())
        assert all(not a.ledger.shared_ref_counts for a in cache.cache_allocators.values())
        return cache.num_sectors - cache.pool.num_free_sectors


@contextlib.asynccontextmanager
async def started(source: Any, *, cache_tokens: int = 2048, **settings: Any):
    engine = TransformersEngine(
        EngineSettings(model="tiny", source=str(source), **settings), cache_tokens=cache_tokens
    )
    running = Running(engine, str(source))
    running.info = await engine.start(running.on_step)
    try:
        yield running
    finally:
        await engine.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), eos=None))


@pytest.fixture
async def tiny(folder) -> AsyncIterator[Running]:
    async with started(folder) as running:
        yield running


async def test_the_registry_makes_it(folder):
    engine = create_engine("transformers", EngineSettings(model="tiny", source=folder))
    assert isinstance(engine, TransformersEngine)
    assert engine.health().active == 0
    await engine.stop()


async def test_it_says_what_it_is(folder, capfd):
    told: list[str] = []
    async with started(folder, on_progress=told.append) as running:
        assert running.info.vocabulary_size == 260
        assert running.info.context_length == 512
        assert running.info.cache_tokens == 2048
        assert running.info.numerics.startswith("cpu/float32/sdpa")
        assert await running.run("a")
    assert told == ["starting torch", "loading weights", "warming up"]
    assert capfd.readouterr() == ("", "")


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


async def test_a_budget_ends_with_length(tiny):
    assert len(await tiny.run("a", max_new_tokens=7)) == 7
    assert tiny.finish("a").finish == "length"
    assert len(await tiny.run("b", max_new_tokens=1)) == 1


async def test_every_end_token_stops_and_none_is_shown(tmp_path, tiny):
    text = await tiny.run("free")
    first = text[0]
    later = next(token_id for token_id in text if token_id != first)
    for ends in ([later], [259, later], [first, later]):
        folder = write_tiny_model(tmp_path / "-".join(map(str, ends)), eos=ends)
        async with started(folder) as running:
            tokens = await running.run("a")
            cut = min(text.index(end) for end in ends if end in text)
            assert tokens == text[:cut]
            assert running.finish("a").finish == "stop"
            # The end token counts as one of the budget, and is the last that fits.
            assert await running.run("b", max_new_tokens=cut + 1) == text[:cut]
            assert running.finish("b").finish == "stop"


@pytest.mark.parametrize(
    ("token_ids", "changes", "param"),
    [
        ([], {}, "prompt"),
        ([5, 260], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([5] * 512, {}, "prompt"),
        ([5] * 100_000, {}, "prompt"),
        ([5], {"max_new_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_can_never_run_is_refused(tiny, token_ids, changes, param):
    with pytest.raises(InvalidRequest) as caught:
        tiny.submit("bad", token_ids, **changes)
    assert caught.value.param == param
    assert tiny.engine.health().active == 0
    assert await tiny.run("good")


async def test_a_running_requests_id_is_refused(tiny):
    tiny.submit("a", max_new_tokens=200)
    with pytest.raises(InvalidRequest, match="runs already"):
        tiny.submit("a")
    await tiny.finished("a")
    assert len(tiny.tokens("a")) == 200


async def test_the_budget_ends_with_the_context(tiny):
    assert len(await tiny.run("a", [5] * 500, max_new_tokens=1000)) == 12
    assert tiny.finish("a").finish == "length"


async def test_the_cache_bounds_the_context(folder):
    async with started(folder, cache_tokens=96) as running:
        assert running.info.context_length == 96
        assert len(await running.run("a", max_new_tokens=1000)) == 91
        with pytest.raises(InvalidRequest):
            running.submit("b", [5] * 96)


async def test_a_step_comes_in_one_call(tiny):
    names = [f"r{i}" for i in range(8)]
    for name in names:
        tiny.submit(name, max_new_tokens=30)
    await tiny.finished(*names)
    whole = [step for step in tiny.steps if len(step) == 8]
    assert len(whole) >= 25
    assert all(len(tiny.tokens(name)) == 30 for name in names)


async def test_a_seed_is_what_counts(tiny):
    sampled = {"temperature": 1.0, "max_new_tokens": 40}
    one = await tiny.run("a", seed=5, **sampled)
    assert await tiny.run("b", seed=5, fallback_seed=2, **sampled) == one
    assert await tiny.run("c", seed=None, fallback_seed=5, **sampled) == one
    assert await tiny.run("d", seed=0, fallback_seed=5, **sampled) != one
    assert await tiny.run("e", seed=6, **sampled) != one


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "top_k": 20, "seed": 3},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 1.2, "top_p": 0.9, "seed": 5},
    ],
)
async def test_a_resumed_text_goes_on_alike(tiny, sampling):
    whole = await tiny.run("whole", max_new_tokens=60, **sampling)
    for i in range(5):
        tiny.submit(f"other{i}", [50 + i] * 40, max_new_tokens=200, temperature=1.0, seed=i)
    for k in (1, 8, 31, 32, 33, 59):
        rest = await tiny.run(
            f"from{k}",
            PROMPT + whole[:k],
            prompt_length=len(PROMPT),
            max_new_tokens=60 - k,
            **sampling,
        )
        assert rest == whole[k:]


async def test_nothing_comes_after_cancel(tiny):
    for i in range(6):
        tiny.submit(f"r{i}", max_new_tokens=300)
    await tiny.until(lambda: len(tiny.tokens("r5")) > 3)
    for i in range(0, 6, 2):
        tiny.engine.cancel(f"r{i}")
    before = [len(tiny.tokens(f"r{i}")) for i in range(6)]
    assert tiny.engine.health().active == 3
    await tiny.finished("r1", "r3", "r5")
    assert [len(tiny.tokens(f"r{i}")) for i in (0, 2, 4)] == before[::2]
    assert all(len(tiny.tokens(f"r{i}")) == 300 for i in (1, 3, 5))
    await tiny.settle()
    assert tiny.blocks_in_use() == 0


async def test_cancel_before_the_engine_saw_the_request(tiny):
    for i in range(200):
        tiny.submit(f"r{i}", max_new_tokens=400)
        if i % 3 == 0:
            await asyncio.sleep(0)
        tiny.engine.cancel(f"r{i}")
    assert tiny.engine.health().active == 0
    await tiny.settle()
    assert tiny.steps == []
    assert tiny.blocks_in_use() == 0


async def test_an_id_can_be_used_again_after_cancel(tiny):
    tiny.submit("a", max_new_tokens=400)
    tiny.engine.cancel("a")
    tiny.submit("a", max_new_tokens=5)
    await tiny.finished("a")
    assert len(tiny.tokens("a")) == 5
    await tiny.settle()


async def test_cancel_of_what_does_not_run_is_nothing(tiny):
    tiny.engine.cancel("never")
    await tiny.run("a")
    tiny.engine.cancel("a")
    assert await tiny.run("b") == tiny.tokens("a")


async def test_more_than_the_cache_holds_waits_its_turn(folder, tiny):
    """Nobody fails, and losing the cache to others for a while changes no text."""
    prompts = {f"r{i}": [20 + i] * (5 + 7 * i) for i in range(12)}
    sampled = {"temperature": 1.0, "top_k": 30, "max_new_tokens": 90}
    for i, (name, token_ids) in enumerate(prompts.items()):
        tiny.submit(name, token_ids, seed=i, **sampled)
    await tiny.finished(*prompts)
    async with started(folder, cache_tokens=192) as small:
        for i, (name, token_ids) in enumerate(prompts.items()):
            small.submit(name, token_ids, seed=i, **sampled)
        await small.finished(*prompts)
        assert small.engine.health().fatal is None
        assert small.blocks_in_use() == 0
        for name in prompts:
            assert small.tokens(name) == tiny.tokens(name)
            assert len(small.tokens(name)) == 90


async def test_cancelling_those_who_took_the_room_lets_the_others_run(folder):
    """The library starts nothing new after it took a cache, until a request has finished."""
    async with started(folder, cache_tokens=128) as small:
        for i in range(4):
            small.submit(f"r{i}", [20 + i] * 40, max_new_tokens=60)
        scheduler = small.manager.batch_processor.scheduler
        await small.until(lambda: scheduler.block_new_requests)
        running = list(scheduler.active_requests.values())
        waiting = list(scheduler.waiting_requests.values())
        assert waiting
        for state in running:
            small.engine.cancel(state.generation.request.request_id)
        await small.finished(*(state.generation.request.request_id for state in waiting))


async def test_more_requests_than_a_step_serves(folder):
    async with started(folder, max_concurrent=3) as running:
        names = [f"r{i}" for i in range(10)]
        for name in names:
            running.submit(name, max_new_tokens=15)
        assert running.engine.health().active == 10
        await running.finished(*names)
        assert max(len(step) for step in running.steps) == 3


async def test_a_long_prompt_is_read_in_pieces(tiny):
    before = tiny.engine.health().steps
    await tiny.run("a", list(range(5, 255)) * 2, max_new_tokens=5)
    assert tiny.engine.health().steps - before >= 6


async def test_health_counts(tiny):
    before = tiny.engine.health()
    assert before.active == 0
    assert before.fatal is None
    await tiny.run("a", max_new_tokens=10)
    after = tiny.engine.health()
    assert after.steps >= before.steps + 10
    assert after.active == 0


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
        assert time.monotonic() - began < 5
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


async def test_drawing_on_the_device_gives_the_same_text(folder, tiny, monkeypatch):
    """What a GPU does with or without CUDA graphs, here on the CPU."""
    from millstream.worker.engines import transformers_batching as batching

    sampled = {"temperature": 1.0, "max_new_tokens": 40, "seed": 9}
    expected = {
        "a": await tiny.run("a", **sampled),
        "b": await tiny.run("b", top_k=7, **sampled),
        "c": await tiny.run("c", top_p=0.8, **sampled),
        "d": await tiny.run("d"),
    }
    real = batching.PositionKeyedSampling
    for replayed in (False, True):
        monkeypatch.setattr(
            batching,
            "PositionKeyedSampling",
            lambda replayed=replayed, **_: real(on_device=True, replayed=replayed),
        )
        async with started(folder) as running:
            running.submit("a", **sampled)
            running.submit("b", top_k=7, **sampled)
            running.submit("c", top_p=0.8, **sampled)
            running.submit("d")
            await running.finished("a", "b", "c", "d")
            assert {name: running.tokens(name) for name in expected} == expected


def _windowed(**layers: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=260,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.2,
            use_sliding_window=True,
            sliding_window=16,
            eos_token_id=None,
            **layers,
        )
    )


@pytest.mark.parametrize("kind", ["full", "windows", "both"])
async def test_the_text_is_that_of_plain_generate(tmp_path, kind):
    """Far past the window, too (transformers#47708, #47911), with a prompt longer than a step."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    folder = write_tiny_model(tmp_path, eos=None)
    if kind != "full":
        second = "sliding_attention" if kind == "windows" else "full_attention"
        torch.manual_seed(1)
        _windowed(layer_types=["sliding_attention", second]).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = {"short": PROMPT, "long": [i * 7 % 250 + 5 for i in range(300)]}
    with torch.no_grad():
        expected = {
            name: model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                generation_config=GenerationConfig(
                    max_new_tokens=50, do_sample=False, pad_token_id=0
                ),
            )[0, len(ids) :].tolist()
            for name, ids in prompts.items()
        }
    async with started(folder) as running:
        for name, ids in prompts.items():
            running.submit(name, ids, max_new_tokens=50)
        await running.finished(*prompts)
        for name, token_ids in expected.items():
            end = token_ids.index(2) if 2 in token_ids else len(token_ids)
            assert end > 32  # twice the window, or the test shows nothing
            assert running.tokens(name) == token_ids[:end]
