"""Linear layers of 8 bits: near the others, exact in their sums, and blind to the batch."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from tests.support.transformers_kernels import PACKED
from tests.support.transformers_running import started
from tests.support.transformers_tiny import write_tiny_model
from torch import nn

from millstream.shared.errors import SettingsError
from millstream.worker.engines.base import EngineSettings
from millstream.worker.engines.transformers_forecast import forecast
from millstream.worker.engines.transformers_int8 import (
    Int8Linear,
    Rounding,
    is_quantized,
)
from millstream.worker.engines.transformers_source import choose_dtype, load_model

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not PACKED["int8"], reason="no VNNI, or no oneDNN in this torch"),
]


def quantized(layer: nn.Linear) -> Int8Linear:
    return Int8Linear(layer, Rounding())


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_it_computes_nearly_the_same(bias):
    layer, values = nn.Linear(576, 192, bias=bias), torch.randn(1, 17, 576)
    expected, result = layer(values), quantized(layer)(values)
    assert result.shape == expected.shape
    assert (result - expected).norm() < 0.02 * expected.norm()


@torch.no_grad()
def test_it_is_the_product_of_the_rounded_ones():
    """Worked out by hand: scales 2/127 and 4/127, a row whose largest is 1."""
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = torch.tensor([[2.0, -1.0], [0.5, 4.0]])
    result = quantized(layer)(torch.tensor([[1.0, 0.25], [0.0, 0.0]]))
    # 127 and 32 of 127; 127 and -64 (-63.5, to even) of 127 by 2; 16 and 127 of 127 by 4.
    first = [2 * (127 * 127 - 32 * 64) / 127**2, 4 * (127 * 16 + 32 * 127) / 127**2]
    torch.testing.assert_close(result, torch.tensor([first, [0.0, 0.0]]))


@torch.no_grad()
def test_a_row_has_the_same_bits_in_any_batch():
    layer = quantized(nn.Linear(576, 1536, bias=False))
    rows = torch.randn(256, 576)
    whole = layer(rows)
    for count in (1, 2, 3, 4, 7, 16, 33, 200):
        assert torch.equal(layer(rows[:count].clone()), whole[:count])


@torch.no_grad()
def test_values_that_were_written_into_are_rounded_anew():
    layer, values = quantized(nn.Linear(8, 8, bias=False)), torch.randn(2, 8)
    before = layer(values)
    assert torch.equal(layer(values), before)
    values.mul_(2)
    torch.testing.assert_close(layer(values), 2 * before)


async def test_a_model_in_8_bits(tmp_path):
    folder = write_tiny_model(tmp_path, eos=None)
    settings = EngineSettings(model="tiny", source=str(folder), dtype="int8", device="cpu")
    model = load_model(settings).model
    assert is_quantized(model)
    assert not any(type(module) is nn.Linear for module in model.modules())
    told = forecast(settings)
    assert told is not None
    assert told.dtype == "int8"
    whole = forecast(replace(settings, dtype="float32"))
    assert whole is not None
    assert told.weights < whole.weights
    async with started(folder, dtype="int8", device="cpu") as running:
        assert running.info.numerics.startswith("cpu/int8/sdpa+onednn/torch-")
        alone = await running.run("alone")
        for number in range(5):
            running.submit(f"{number}", [20 + number] * (number + 3))
        assert await running.run("batch") == alone


def test_it_is_for_cpus():
    with pytest.raises(SettingsError, match="is for CPUs"):
        choose_dtype("int8", torch.device("cuda", 0))
