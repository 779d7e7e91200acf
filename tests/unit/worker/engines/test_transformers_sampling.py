"""Sampling is exact, and a function of seed and position alone."""

import time
from collections import Counter

import pytest

pytest.importorskip("torch")

import torch

from millstream.worker.engines.transformers_sampling import (
    Draw,
    choose,
    is_greedy,
    mark_choices,
    stream_key,
)

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0, 0.5, -30.0])
# The 99.9 % point of chi-square with five degrees of freedom, for the six tokens that can come.
CHI_SQUARE_5 = 20.5


def draw(
    seed: int, position: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Draw:
    return Draw(temperature, top_k, top_p, stream_key(seed, position))


def drawn(logits: torch.Tensor, draws: list[Draw | None]) -> list[int]:
    """What the rows choose on the CPU; a single row of logits serves all."""
    scores = logits.expand(len(draws), -1).clone() if logits.dim() == 1 else logits.clone()
    mark_choices(scores, draws)
    return scores.argmax(dim=-1).tolist()


def chosen(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    """The same by the way that CUDA graphs take."""
    keys = torch.tensor([d.key - (1 << 64) if d.key >> 63 else d.key for d in draws])
    return (
        choose(
            logits.expand(len(draws), -1) if logits.dim() == 1 else logits,
            torch.tensor([d.temperature for d in draws]),
            torch.tensor([d.top_k for d in draws], dtype=torch.int32),
            torch.tensor([d.top_p for d in draws]),
            keys,
        )
        .flatten()
        .tolist()
    )


def chi_square(counts: Counter[int], probabilities: torch.Tensor) -> float:
    total = sum(counts.values())
    return sum(
        (counts[token] - total * p) ** 2 / (total * p)
        for token, p in enumerate(probabilities.tolist())
        if p > 1e-9
    )


def test_key_is_the_published_splitmix64():
    # The first outputs from state 1234567, as in the test vectors of Vigna's splitmix64.c.
    from millstream.worker.engines.transformers_sampling import _GAMMA, _mix

    outputs = [_mix(1234567 + n * _GAMMA) for n in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("way", [drawn, chosen])
def test_draws_follow_the_softmax(vary, way):
    count = 4000
    draws = [draw(i, 3) if vary == "seed" else draw(5, i) for i in range(count)]
    assert chi_square(Counter(way(LOGITS, draws)), LOGITS.softmax(0)) < CHI_SQUARE_5


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_temperature_scales_the_softmax(temperature):
    draws = [draw(i, 0, temperature=temperature) for i in range(4000)]
    expected = (LOGITS / temperature).softmax(0)
    assert chi_square(Counter(drawn(LOGITS, draws)), expected) < CHI_SQUARE_5


def test_top_k_draws_from_the_best_with_their_own_softmax():
    draws = [draw(i, 0, top_k=3) for i in range(4000)]
    expected = LOGITS.masked_fill(LOGITS < 1.0, -torch.inf).softmax(0)
    counts = Counter(drawn(LOGITS, draws))
    assert set(counts) == {0, 1, 4}
    assert chi_square(counts, expected) < CHI_SQUARE_5


def test_top_p_draws_from_the_smallest_set_that_has_the_mass():
    # 0.605 and 0.222 are the two largest: together they pass 0.7, the first alone does not.
    draws = [draw(i, 0, top_p=0.7) for i in range(4000)]
    expected = LOGITS.masked_fill(LOGITS < 2.0, -torch.inf).softmax(0)
    counts = Counter(drawn(LOGITS, draws))
    assert set(counts) == {0, 4}
    assert chi_square(counts, expected) < CHI_SQUARE_5


def test_top_p_of_nothing_leaves_the_best():
    assert set(drawn(LOGITS, [draw(i, 0, top_p=0.0) for i in range(50)])) == {4}


def test_top_p_counts_the_mass_within_top_k():
    # Of the three best, the largest has 0.665 of the mass; of all it has 0.605.
    draws = [draw(i, 0, top_k=3, top_p=0.65) for i in range(200)]
    assert set(drawn(LOGITS, draws)) == {4}
    assert set(drawn(LOGITS, [draw(i, 0, top_p=0.65) for i in range(200)])) == {0, 4}


def test_rows_do_not_touch_each_other():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(12, 2000, generator=generator) * 4
    draws: list[Draw | None] = [
        None
        if i % 4 == 0
        else draw(i, i, temperature=0.9, top_k=(0, 40, 100)[i % 3], top_p=(1.0, 0.9)[i % 2])
        for i in range(12)
    ]
    together = drawn(logits, draws)
    alone = [drawn(logits[i : i + 1], [draws[i]])[0] for i in range(12)]
    backwards = drawn(logits.flip(0), draws[::-1])[::-1]
    assert together == alone == backwards


def test_greedy_rows_and_rows_without_a_draw_stay_untouched():
    logits = torch.randn(3, 100)
    scores = logits.clone()
    mark_choices(scores, [None, draw(1, 1)])
    assert torch.equal(scores[[0, 2]], logits[[0, 2]])
    assert torch.isinf(scores[1]).sum() == 1


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (1, 1.0), (50, 1.0), (0, 0.9), (50, 0.95), (600, 0.999)]
)
def test_both_ways_choose_alike(top_k, top_p):
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(40, 5000, generator=generator) * 3
    draws = [draw(i, 2 * i, temperature=0.8, top_k=top_k, top_p=top_p) for i in range(40)]
    assert drawn(logits, list(draws)) == chosen(logits, draws)


def test_nucleus_wider_than_any_window_is_whole():
    # Flat logits: a mass of 0.9 needs 9,000 of 10,000 tokens.
    logits = torch.zeros(10_000) - torch.arange(10_000) * 1e-6
    tokens = drawn(logits, [draw(i, 0, top_p=0.9) for i in range(60)])
    assert max(tokens) < 9_010
    assert max(tokens) > 4_096
    assert tokens == chosen(logits, [draw(i, 0, top_p=0.9) for i in range(60)])


def test_a_draw_from_all_is_the_largest_of_all():
    """Only who can win is looked at; what that leaves out never wins."""
    generator = torch.Generator().manual_seed(5)
    for spread in (0.01, 1.0, 5.0, 60.0):
        logits = torch.randn(40, 5000, generator=generator) * spread
        logits[:, ::7] = -torch.inf
        draws = [draw(i, 2 * i) for i in range(40)]
        assert drawn(logits, list(draws)) == chosen(logits, draws)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.9), (3, 1.0), (3, 0.9)])
def test_a_row_that_is_no_numbers_leaves_the_others_alone(broken, top_k, top_p):
    logits = LOGITS.repeat(2, 1)
    logits[0, 5] = broken
    draws = [draw(i, 0, top_k=top_k, top_p=top_p) for i in range(2)]
    mark_choices(logits, list(draws))
    assert torch.isinf(logits[0]).sum() == 1
    assert logits[1:].argmax(dim=-1).tolist() == drawn(LOGITS[None], [draws[1]])


@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 2.0, 100.0])
def test_extreme_temperatures(temperature):
    tokens = drawn(LOGITS, [draw(i, 0, temperature=temperature) for i in range(300)])
    if temperature < 0.1:
        assert set(tokens) == {4}
    else:
        assert len(set(tokens)) >= 6 if temperature > 10 else len(set(tokens)) >= 4


def test_a_temperature_next_to_nothing_is_greedy():
    assert is_greedy(0.0)
    assert is_greedy(1e-6)
    assert not is_greedy(1e-3)
    assert chosen(LOGITS, [draw(1, 1, temperature=0.0)]) == [4]


def test_top_k_of_the_whole_vocabulary_is_no_limit():
    for k in (7, 8, 1 << 40):
        draws = [draw(i, 0, top_k=k) for i in range(100)]
        assert drawn(LOGITS, list(draws)) == drawn(LOGITS, [draw(i, 0) for i in range(100)])


def test_seeds_of_any_size_and_sign_are_taken():
    keys = {stream_key(seed, 0) for seed in (0, 1, -1, 2**63, 2**64 - 1, 2**70 + 5)}
    assert all(0 <= key < 2**64 for key in keys)
    assert len(keys) == 5  # -1 and 2**64 - 1 have the same 64 bits


def test_noise_never_overflows():
    """The ends of the uniform numbers give finite noise."""
    from millstream.worker.engines import transformers_sampling as sampling

    ends = torch.tensor([2.0**-64, 1.0 - 2.0**-24])
    noise = sampling._gumbel(ends.clone())
    assert torch.isfinite(noise).all()
    assert noise[0] > 44
    assert noise[1] < -2


def test_all_greedy_costs_nothing():
    scores = torch.randn(32, 49_152)
    began = time.perf_counter()
    for _ in range(100):
        mark_choices(scores, [None] * 32)
    assert time.perf_counter() - began < 0.1
