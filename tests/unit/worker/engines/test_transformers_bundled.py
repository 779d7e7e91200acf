"""The bundled model gives true answers, the same however it is batched or interrupted."""

from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.bundled import Bundled

# One engine for all, on the module's event loop. A first start converts the weights.
pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about rain.",
    "How do I bake bread? Be detailed.",
    "Tell me a joke.",
)
SAMPLED = {"temperature": 0.8, "top_k": 50, "seed": 11}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bundled() -> AsyncIterator[Bundled]:
    running = Bundled()
    running.memory_before = psutil.Process().memory_info().rss
    await running.engine.start(running.on_step)
    yield running
    await running.engine.stop()


async def test_it_knows_the_capital_of_france(bundled):
    bundled.submit("paris", bundled.prompt(QUESTIONS[0]))
    await bundled.ends("paris")
    assert "Paris" in bundled.engine.tokenizer.decode(bundled.said["paris"])
    assert bundled.ended["paris"].finish == "stop"


async def test_memory_stays_small(bundled):
    assert psutil.Process().memory_info().rss - bundled.memory_before < 2.2e9


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
async def test_alone_in_a_batch_and_resumed_alike(bundled, sampling):
    prompts = [bundled.prompt(question) for question in QUESTIONS]
    bundled.submit("alone", prompts[1], **sampling)
    await bundled.ends("alone")
    text = bundled.said["alone"]
    assert len(text) == 30
    for i, prompt in enumerate(prompts):
        bundled.submit(f"batch{i}", prompt, **sampling)
    resumed = [1, 8, 16]
    for k in resumed:
        bundled.submit(f"from{k}", prompts[1], text[:k], **sampling)
    await bundled.ends("batch0", "batch1", "batch2", "batch3", *(f"from{k}" for k in resumed))
    assert bundled.said["batch1"] == text
    for k in resumed:
        assert bundled.said[f"from{k}"] == text[k:]


async def test_32_at_once_and_half_of_them_cancelled(bundled):
    names = [f"many{i}" for i in range(32)]
    for i, name in enumerate(names):
        sampling = {} if i % 2 else {"temperature": 1.0, "seed": i}
        bundled.submit(name, bundled.prompt(QUESTIONS[i % 4]), max_new_tokens=24, **sampling)
    await bundled.until(lambda: all(len(bundled.said.get(name, ())) > 3 for name in names))
    dropped = names[::2]
    for name in dropped:
        bundled.engine.cancel(name)
    before = {name: list(bundled.said[name]) for name in dropped}
    await bundled.ends(*names[1::2])
    assert {name: bundled.said[name] for name in dropped} == before
    assert bundled.engine.health().active == 0
    scheduler = bundled.engine._manager.batch_processor.scheduler
    await bundled.until(lambda: not scheduler.has_pending_requests())
    cache = scheduler.cache
    cache.evict_cached_blocks()
    cache.pool.try_to_free_sectors()
    assert cache.pool.num_free_sectors == cache.num_sectors


async def test_a_beginning_that_others_had_is_read_once(bundled):
    ids = bundled.prompt("The sky is blue and the grass is green. " * 60 + "What is green?")
    assert len(ids) > 600
    steps = []
    for name in ("first", "second"):
        before = bundled.engine.health().steps
        bundled.submit(name, ids, max_new_tokens=4)
        await bundled.ends(name)
        steps.append(bundled.engine.health().steps - before)
    assert bundled.said["first"] == bundled.said["second"]
    assert steps[1] <= steps[0] - 2
