"""The transformers engine on tiny models: what it refuses, delivers, and shares."""

import asyncio
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.transformers_running import Running, started
from tests.support.transformers_tiny import write_tiny_model

from millstream.shared.errors import InvalidRequest
from millstream.worker.engines.base import EngineSettings
from millstream.worker.engines.transformers_forecast import forecast

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), eos=None))


@pytest.fixture
async def tiny(folder) -> AsyncIterator[Running]:
    async with started(folder) as running:
        yield running


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


async def test_what_it_takes_is_told_before(folder, tiny):
    settings = EngineSettings(model="tiny", source=folder, max_concurrent=3)
    told = forecast(settings)
    assert told is not None
    assert told.cache is not None
    async with started(folder, max_concurrent=3, cache_tokens=None) as running:
        assert told.cache.cache_tokens == running.info.cache_tokens
        assert running.info.numerics.startswith(f"{told.device}/{told.dtype}/")


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


async def test_nobody_starves(tiny):
    """32 go on side by side (transformers#42943, #42929)."""
    names = [f"side{i}" for i in range(32)]
    for i, name in enumerate(names):
        tiny.submit(name, [20 + i] * 5, max_new_tokens=40, temperature=1.0, seed=i)
    await tiny.until(lambda: any(len(tiny.tokens(name)) == 40 for name in names))
    behind = [len(tiny.tokens(name)) for name in names if not tiny.finish(name)]
    await tiny.finished(*names)
    assert all(count > 20 for count in behind)


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
