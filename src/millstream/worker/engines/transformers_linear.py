# pyright: basic
"""Linear layers on a CPU, with weights in the order in which its kernels read them.

torch multiplies by MKL, which packs the weights anew for every step and takes other kernels for
other numbers of rows. oneDNN keeps them packed: SmolLM2-135M needs 48 ms of CPU a step instead of
79 with 16 rows here, and 27 instead of 33 with one. Within limits its rows also have the same bits
in any batch, so that a text goes on alike wherever it is resumed. These are the operators that
torch's own compiler uses for frozen models.
"""

import logging

import torch
from torch import nn
from torch.nn.functional import linear

from millstream.worker.engines.transformers_rows import (
    RowLimits,
    find_row_limits,
    multiply_within,
)

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """A linear layer that cannot be trained any more.

    Args:
        layer: The layer it replaces, on the CPU.

    Attributes:
        limits: How many rows are multiplied at once.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.bias = layer.bias
        self.limits = RowLimits()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().contiguous())

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was, unpacked at every look; [out_features, in_features]."""
        return self._packed.to_dense()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        rows = values.reshape(-1, self.in_features)
        result = multiply_within(self.limits, self._multiply, rows)
        return result.view(*values.shape[:-1], self.out_features)

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")


@torch.no_grad()
def pack_linears(model: nn.Module) -> None:
    """Replace a CPU model's linear layers by packed ones, where that is possible.

    The memory stays the same: each weight is let go once it is packed, and what is not packed is
    copied out of the weights' file, so that its pages need not stay.
    """
    first = next(model.parameters())
    if first.device.type != "cpu" or first.dtype not in _DTYPES or not can_pack(first.dtype):
        return
    limits: dict[tuple[object, ...], RowLimits] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype in _DTYPES:
                packed = PackedLinear(child)
                kind = (child.weight.shape, child.weight.dtype, child.bias is None)
                if kind not in limits:
                    limits[kind] = find_row_limits(packed, child.weight.dtype)
                packed.limits = limits[kind]
                setattr(parent, name, packed)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()


def is_packed(model: nn.Module) -> bool:
    """Whether `pack_linears` replaced anything."""
    return any(isinstance(module, PackedLinear) for module in model.modules())


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch, on this processor, has the operators and they are right."""
    layer = nn.Linear(48, 80, dtype=dtype)
    rows = torch.randn(5, 48, dtype=dtype)
    try:
        result = PackedLinear(layer)(rows)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        logger.debug("no packed linear layers: %s", error)
        return False
    expected = linear(rows, layer.weight, layer.bias)
    return torch.allclose(result, expected, rtol=0.02, atol=0.02)
