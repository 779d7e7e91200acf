"""The CPU's own attention and linear layers compute what transformers' do."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from tests.support.transformers_kernels import PACKED, where_packed
from torch import nn
from transformers.generation.continuous_batching.utils import build_attention_mask
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from millstream.worker.engines.transformers_attention import attention
from millstream.worker.engines.transformers_int8 import can_quantize, quantize_linears
from millstream.worker.engines.transformers_linear import (
    PackedLinear,
    can_pack,
    is_packed,
    pack_linears,
)
from millstream.worker.engines.transformers_rows import (
    RowLimits,
    find_row_limits,
    multiply_within,
)

pytestmark = pytest.mark.timeout(120)

HEADS, HEADS_KV, SIZE = 9, 3, 64
LAYER = nn.Module()
LAYER.num_key_value_groups, LAYER.is_causal = HEADS // HEADS_KV, True
ROOT = SIZE**-0.5

needs_packing = pytest.mark.skipif(not PACKED["float32"], reason="no oneDNN in this torch")


def packed(lengths, window=None, value_size=SIZE):
    """Query, key, value, mask and options of requests, given as (query tokens, tokens) pairs."""
    generator = torch.Generator().manual_seed(1)
    starts_q, starts_k = [0], [0]
    for queries, tokens in lengths:
        starts_q.append(starts_q[-1] + queries)
        starts_k.append(starts_k[-1] + tokens)
    shapes = (starts_q[-1], HEADS, SIZE), (starts_k[-1], HEADS_KV, SIZE)
    query, key = (torch.randn(s, generator=generator).transpose(0, 1)[None] for s in shapes)
    value = torch.randn(starts_k[-1], HEADS_KV, value_size, generator=generator)
    mask = torch.zeros(1, 1, starts_q[-1], starts_k[-1]) + torch.finfo(torch.float32).min
    build_attention_mask(mask, starts_q, starts_k, window or 1)
    options = {
        "cu_seq_lens_q": torch.tensor(starts_q, dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor(starts_k, dtype=torch.int32),
        "sliding_window": window,
        "is_causal": False,
    }
    return (query, key, value.transpose(0, 1)[None], mask), options


@pytest.mark.parametrize(
    ("lengths", "window"),
    [
        ([(1, 1)], None),
        ([(7, 7)], None),
        ([(1, 100)] * 5, None),
        ([(1, 30), (7, 7), (3, 20), (1, 9)], None),
        ([(40, 300)], None),
        ([(1, 10), (7, 15), (3, 12), (1, 9)], 10),
    ],
)
@torch.no_grad()
def test_packed_attention_is_the_masked_one(lengths, window):
    tensors, options = packed(lengths, window)
    ours, _ = attention(LAYER, *tensors, scaling=ROOT, **options)
    theirs, _ = sdpa_attention_forward(LAYER, *tensors, scaling=ROOT, **options)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_values_may_have_a_size_of_their_own():
    tensors, options = packed([(1, 30), (4, 9)], value_size=32)
    ours, _ = attention(LAYER, *tensors, scaling=ROOT, **options)
    theirs, _ = sdpa_attention_forward(LAYER, *tensors, scaling=ROOT, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_requests_attention_does_not_depend_on_the_others():
    (query, key, value, mask), options = packed([(1, 50), (1, 200), (9, 9), (1, 33)])
    together, _ = attention(LAYER, query, key, value, mask, scaling=ROOT, **options)
    alone_options = {
        "cu_seq_lens_q": torch.tensor([0, 1], dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor([0, 200], dtype=torch.int32),
    }
    alone, _ = attention(
        LAYER,
        query[:, :, 1:2],
        key[:, :, 50:250],
        value[:, :, 50:250],
        mask[:, :, 1:2, 50:250],
        scaling=ROOT,
        **alone_options,
    )
    assert torch.equal(together[:, 1:2], alone)


@torch.no_grad()
def test_attention_outside_of_batches_is_the_librarys():
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, HEADS, 5, SIZE, generator=generator)
    key = torch.randn(2, HEADS_KV, 5, SIZE, generator=generator)
    ours, _ = attention(LAYER, query, key, key, None, scaling=ROOT)
    theirs, _ = sdpa_attention_forward(LAYER, query, key, key, None, scaling=ROOT)
    assert torch.equal(ours, theirs)


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_packed_layer_computes_the_same(bias):
    layer = nn.Linear(576, 192, bias=bias)
    values = torch.randn(1, 17, 576)
    result = PackedLinear(layer)(values)
    assert result.shape == (1, 17, 192)
    torch.testing.assert_close(result, layer(values), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(PACKED))
def test_what_the_processor_has_is_used(name):
    """Or the tests below would be of layers that no worker takes."""
    used = can_quantize() if name == "int8" else can_pack(getattr(torch, name))
    assert used == PACKED[name]


@where_packed("float32", "bfloat16", "int8")
@pytest.mark.parametrize("shape", [(64, 32), (576, 192), (576, 1536), (1536, 576), (576, 20_000)])
@torch.no_grad()
def test_a_row_has_the_same_bits_in_any_batch(dtype, shape):
    """oneDNN sums one row of more than 1,024 numbers in another order; with AMX, many as well."""
    values = torch.float32 if dtype == "int8" else getattr(torch, dtype)
    model = nn.Sequential(nn.Linear(*shape, bias=False, dtype=values))
    if dtype == "int8":
        quantize_linears(model)
    else:
        pack_linears(model)
        assert is_packed(model)
    rows = torch.randn(256, shape[0], dtype=values)
    whole = model(rows).clone()
    for count in (1, 2, 3, 4, 7, 16, 33, 65, 129, 200):
        for at in (0, 40):
            assert torch.equal(model(rows[at : at + count].clone()), whole[at : at + count])


@pytest.mark.parametrize(
    ("differs", "limits"),
    [
        (lambda count: False, RowLimits()),
        (lambda count: count == 1, RowLimits(2)),
        (lambda count: count < 3, RowLimits(4)),
        (lambda count: count < 10, RowLimits(16)),
        (lambda count: count > 32, RowLimits(1, 32)),
        (lambda count: count > 20 and count % 2, RowLimits(1, 16)),
        (lambda count: count < 3 or count == 64, RowLimits(4, 32)),
        (lambda count: count, RowLimits(16, 16)),
    ],
)
@pytest.mark.parametrize("out_features", [5, 20_000])
@torch.no_grad()
def test_how_many_rows_are_alike_is_found_out(differs, limits, out_features):
    class Layer(nn.Module):
        in_features = 8

        def __init__(self) -> None:
            super().__init__()
            self.out_features = out_features

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows[:, :1].expand(-1, out_features) + int(differs(len(rows)))

    assert find_row_limits(Layer(), torch.float32) == limits


def test_rows_are_multiplied_within_their_limits():
    rows = torch.randn(70, 8)
    for limits, count, taken in (
        (RowLimits(), 70, [70]),
        (RowLimits(4), 3, [4]),
        (RowLimits(4), 4, [4]),
        (RowLimits(1, 32), 70, [32, 32, 6]),
        (RowLimits(8, 32), 70, [32, 32, 8]),
        (RowLimits(4), 0, [4]),
    ):
        seen: list[int] = []

        def double(given: torch.Tensor, seen: list[int] = seen) -> torch.Tensor:
            seen.append(len(given))
            return 2 * given

        assert torch.equal(multiply_within(limits, double, rows[:count]), 2 * rows[:count])
        assert seen == taken


@needs_packing
def test_a_model_is_packed_with_its_tied_weights():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 32)
            self.inner = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
            self.head = nn.Linear(32, 50, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(self.embed(ids)))

    model = Tied().eval()
    ids = torch.arange(50)
    with torch.no_grad():
        before = model(ids)
        assert not is_packed(model)
        pack_linears(model)
        assert is_packed(model)
        torch.testing.assert_close(model(ids), before, rtol=1e-4, atol=1e-5)
        assert torch.equal(model.head.weight, model.embed.weight)


def test_what_cannot_be_packed_stays():
    model = nn.Sequential(nn.Linear(8, 8)).to(torch.float16)
    pack_linears(model)
    assert not is_packed(model)
