"""The text is the model's own, and the same wherever a request runs and resumes."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.transformers_running import PROMPT, Running, started
from tests.support.transformers_tiny import write_tiny_model

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), eos=None))


@pytest.fixture
async def tiny(folder) -> AsyncIterator[Running]:
    async with started(folder) as running:
        yield running


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
