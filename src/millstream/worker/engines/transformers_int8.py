# pyright: basic
"""Linear layers on a CPU that keep their weights in 8 bits: a quarter of what a step reads.

Weights have a scale for each row; values one for each token, found anew in every step (W8A8 with
dynamic quantization per token, as LLM.int8() and torchao have it). Products are summed as integers,
exactly; within limits their scaling does not depend on what else is in the batch either, so a text
goes on alike wherever it is resumed. The kernels are oneDNN's, by the operators that torch's own
compiler uses for quantized models (PT2E).
"""

import logging

import torch
from torch import nn

from millstream.shared.errors import SettingsError
from millstream.worker.engines.transformers_rows import (
    RowLimits,
    find_row_limits,
    multiply_within,
)

logger = logging.getLogger(__name__)

_MOST = 127.0
_ZERO = 128
"""Values are 0 to 255 with their zero here: oneDNN is fastest with unsigned ones."""
_LEAST = 1e-30
"""Stands for the scale of a token whose values are all 0."""


class Rounding:
    """Values as a step's layers take them; several in a row often take the same tensor.

    Rounding costs as much as the product does where there is one token, so the last result is kept.
    """

    def __init__(self) -> None:
        self._half = torch.tensor(_ZERO + 0.5)
        self._values: torch.Tensor | None = None
        self._version = 0
        self._result: tuple[torch.Tensor, torch.Tensor]

    def __call__(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 [..., n] to uint8 [rows, n], and each row's largest, float32 [rows, 1]."""
        # The version tells whether somebody has written into the tensor meanwhile.
        if values is not self._values or values._version != self._version:
            rows = values.reshape(-1, values.shape[-1])
            largest = rows.abs().amax(dim=1, keepdim=True).clamp_(min=_LEAST)
            # Cutting off the fraction of what is half too large rounds it.
            rounded = torch.addcdiv(self._half, rows, largest, value=_MOST).to(torch.uint8)
            self._result = rounded, largest
            self._values, self._version = values, values._version
        return self._result


class Int8Linear(nn.Module):
    """A linear layer that cannot be trained any more.

    Args:
        layer: The layer it replaces, on the CPU.
        rounding: The model's.

    Attributes:
        limits: How many rows are multiplied at once.
    """

    def __init__(self, layer: nn.Linear, rounding: Rounding) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.bias = layer.bias
        self.limits = RowLimits()
        self._rounding = rounding
        weight = layer.weight.detach()
        self._scales = (weight.abs().amax(dim=1) / _MOST).clamp_(min=_LEAST)
        rounded = (weight / self._scales[:, None]).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], float32."""
        rounded, largest = self._rounding(values)
        result = multiply_within(self.limits, self._multiply, rounded).mul_(largest)
        if self.bias is not None:
            result.add_(self.bias)
        return result.view(*values.shape[:-1], self.out_features)

    def _multiply(self, rounded: torch.Tensor) -> torch.Tensor:
        return torch.ops.onednn.qlinear_pointwise(
            rounded, 1 / _MOST, _ZERO, self._packed, self._scales, None, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip


@torch.no_grad()
def quantize_linears(model: nn.Module) -> None:
    """Replace the linear layers of a float32 model on a CPU; each weight is let go at once.

    Raises:
        SettingsError: this processor, or this build of torch, does not have what it takes.
    """
    if not can_quantize():
        raise SettingsError(
            "MILLSTREAM_DTYPE='int8' needs a processor with instructions for it (VNNI), and a "
            "torch with oneDNN; choose auto, or bfloat16."
        )
    rounding = Rounding()
    limits: dict[torch.Size, RowLimits] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                rounded = Int8Linear(child, rounding)
                kind = child.weight.shape
                if kind not in limits:
                    limits[kind] = find_row_limits(rounded, torch.float32)
                rounded.limits = limits[kind]
                setattr(parent, name, rounded)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()  # off the weights' file, so that its pages need not stay


def is_quantized(model: nn.Module) -> bool:
    """Whether `quantize_linears` replaced anything."""
    return any(isinstance(module, Int8Linear) for module in model.modules())


def quantized_bytes(model: nn.Module) -> int:
    """What a model's weights will take, with those of its linear layers in 8 bits."""
    kept: dict[tuple[int, bool], int] = {}
    for module in model.modules():
        for tensor in module.parameters(recurse=False):
            kept[id(tensor), type(module) is nn.Linear] = (
                tensor.numel() if type(module) is nn.Linear else tensor.nbytes
            )
    return sum(kept.values())


def can_quantize() -> bool:
    """Whether the operators are there and exact: before VNNI, sums of two products overflowed."""
    layer = nn.Linear(64, 32, bias=False)
    layer.weight.data.fill_(1.0)[::2].neg_()
    values = torch.ones(3, 64)
    try:
        result = Int8Linear(layer, Rounding())(values)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        logger.debug("no linear layers of 8 bits: %s", error)
        return False
    return torch.allclose(result, values @ layer.weight.T, rtol=1e-5)
