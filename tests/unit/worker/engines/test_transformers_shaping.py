"""What shapes a choice, against a plain forward pass and transformers' own processors."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from tests.support.bundled import SETTINGS, Bundled
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from millstream.shared.errors import InvalidRequest
from millstream.worker.engines.transformers_source import load_model

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

POEM, BREAD, JOKE = "Write a poem about rain.", "How do I bake bread?", "Tell me a joke."
SAMPLED = {"temperature": 0.8, "top_k": 50, "seed": 11}

ANSWER = 20
SHAPED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "bias": {"logit_bias": {504: 9.0, 28: -100.0}},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.6,
        "logit_bias": {504: 3.0},
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bundled() -> AsyncIterator[Bundled]:
    running = Bundled(cache_tokens=4096)
    await running.engine.start(running.on_step)
    yield running
    await running.engine.stop()


@pytest.fixture(scope="module")
def reference() -> Any:
    """The same weights without a batch, a cache or a server around them."""
    return load_model(SETTINGS).model


def plain_logits(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """The logits for each token of an answer, [answer, vocabulary]."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def shaped_logits(
    logits: torch.Tensor, prompt: Sequence[int], answer: Sequence[int], asked: dict[str, Any]
) -> torch.Tensor:
    """The same after bias and penalties, one token after the other."""
    rows = []
    for at in range(len(answer)):
        row = logits[at : at + 1].clone()
        so_far = torch.tensor([[*prompt, *answer[:at]]])
        if bias := asked.get("logit_bias"):
            row = SequenceBiasLogitsProcessor([[[i], b] for i, b in bias.items()])(so_far, row)
        if penalty := asked.get("repetition_penalty"):
            row = RepetitionPenaltyLogitsProcessor(penalty)(so_far, row)
        for token_id, count in Counter(answer[:at]).items():
            row[0, token_id] -= count * asked.get("frequency_penalty", 0.0)
            row[0, token_id] -= asked.get("presence_penalty", 0.0)
        rows.append(row)
    return torch.cat(rows)


async def test_penalties_and_bias_are_those_of_a_plain_computation(
    bundled: Bundled, reference: Any
) -> None:
    prompt = bundled.prompt(POEM)
    bundled.submit("plain", prompt, max_new_tokens=ANSWER)
    for name, asked in SHAPED.items():  # all in one batch
        bundled.submit(name, prompt, max_new_tokens=ANSWER, **asked)
    await bundled.ends("plain", *SHAPED)
    for name, asked in {"plain": {}, **SHAPED}.items():
        answer = bundled.said[name]
        assert (answer == bundled.said["plain"]) == (name == "plain"), name
        logits = plain_logits(reference, prompt, answer)
        expected = shaped_logits(logits, prompt, answer, asked).argmax(dim=-1)
        assert answer == expected.tolist(), name


async def test_a_takeover_counts_what_had_been_said(bundled: Bundled) -> None:
    prompt = bundled.prompt(BREAD)
    ways = {
        "greedy": SHAPED["all"],
        "sampled": {**SHAPED["all"], "min_p": 0.02, "temperature": 0.9, "seed": 5},
    }
    for way, asked in ways.items():
        bundled.submit(way, prompt, max_new_tokens=ANSWER, **asked)
    await bundled.ends(*ways)
    for way, asked in ways.items():
        for done in (1, 12):
            said = bundled.said[way][:done]
            left = ANSWER - done
            bundled.submit(f"{way} {done}", prompt, said, max_new_tokens=left, **asked)
    await bundled.ends(*(f"{way} {done}" for way in ways for done in (1, 12)))
    for way in ways:
        for done in (1, 12):
            assert bundled.said[f"{way} {done}"] == bundled.said[way][done:], (way, done)


async def test_logprobs_are_those_of_a_plain_forward_pass(bundled: Bundled, reference: Any) -> None:
    prompt = bundled.prompt(JOKE)
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"logprobs": 3},
        "shaped": {"logprobs": 20, **SHAPED["all"], **SAMPLED},  # by the model alone, all the same
        "none": {"logprobs": 0, "temperature": 1.0, "seed": 3},
    }
    for way, asked in ways.items():
        bundled.submit(way, prompt, max_new_tokens=ANSWER, **asked)
    await bundled.ends(*ways)
    for way, asked in ways.items():
        answer, told = bundled.said[way], bundled.logprobs[way]
        assert len(told) == len(answer) > 3
        expected = plain_logits(reference, prompt, answer).log_softmax(dim=-1)
        for row, token_id, logprobs in zip(expected, answer, told, strict=True):
            assert logprobs.logprob == pytest.approx(float(row[token_id]), abs=2e-3)
            best = row.topk(asked["logprobs"])
            assert [value for _, value in logprobs.top] == pytest.approx(
                best.values.tolist(), abs=2e-3
            )
            for token, value in logprobs.top:
                assert value == pytest.approx(float(row[token]), abs=2e-3)
    assert all(logprobs.top[0][1] == logprobs.logprob for logprobs in bundled.logprobs["greedy"])


async def test_min_p_leaves_only_what_transformers_leaves(bundled: Bundled, reference: Any) -> None:
    prompt = bundled.prompt(POEM)
    heat, part = 1.5, 0.1

    def outside(answer: Sequence[int]) -> int:
        scaled = plain_logits(reference, prompt, answer) / heat
        kept = MinPLogitsWarper(part)(torch.zeros(1), scaled)
        return sum(bool(row[token_id].isinf()) for row, token_id in zip(kept, answer, strict=True))

    for seed in range(3):
        hot = {"temperature": heat, "seed": seed, "max_new_tokens": ANSWER}
        bundled.submit(f"all {seed}", prompt, **hot)
        bundled.submit(f"min_p {seed}", prompt, min_p=part, **hot)
        bundled.submit(f"both {seed}", prompt, min_p=part, top_p=0.95, top_k=40, **hot)
    names = [f"{way} {seed}" for way in ("all", "min_p", "both") for seed in range(3)]
    await bundled.ends(*names)
    counts = {name: outside(bundled.said[name]) for name in names}
    assert sum(counts[f"all {seed}"] for seed in range(3)) > 5
    assert not any(counts[f"{way} {seed}"] for way in ("min_p", "both") for seed in range(3))


async def test_a_bias_outside_the_vocabulary_is_refused(bundled: Bundled) -> None:
    for token_id in (-1, 49_152, 2**60):
        with pytest.raises(InvalidRequest) as refused:
            bundled.submit("x", bundled.prompt(JOKE), logit_bias={5: 1.0, token_id: 1.0})
        assert refused.value.param == "logit_bias"


async def test_the_bytes_of_tokens_join_to_the_text(bundled: Bundled) -> None:
    tokenizer = bundled.engine.tokenizer
    text = "Grüße, 日本 😀\n  x <b>\u00a0ok"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == text
    ids = bundled.prompt("hi")
    assert tokenizer.token_bytes(ids[0]) == b"<|im_start|>"
