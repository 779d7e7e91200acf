# pyright: basic
"""How many rows a CPU's linear layer takes at once, so that each has the same bits in any batch.

oneDNN chooses among kernels by the number of rows, and kernels sum in their own order. Without AMX
only one row by itself is another case, and only in wide layers; with AMX, `bfloat16` has another
order beyond 32 rows, and there by the number, and `int8` scales otherwise where a product has few
numbers. Which it is, is found out by trying.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import pad

_COUNTS = (1, 2, 3, 4, 5, 8, 11, 16, 24, 31, 32, 33, 48, 64, 96, 129, 200, 256)
_COUNTS_WHERE_WIDE = (1, 2, 4, 8, 13, 16, 31, 32, 33, 64)
_WIDE = 16_384
_TRIED = 2**16
"""Results that are compared for each count, of 64 rows at the most: one in thousands shows."""


class RowLimits(NamedTuple):
    """Fewer rows are computed with empty ones, more in parts."""

    fewest: int = 1
    most: int | None = None


class Linear(Protocol):
    """What a linear layer has, whatever holds its weights."""

    in_features: int
    out_features: int

    def __call__(self, values: torch.Tensor, /) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        ...


def multiply_within(
    limits: RowLimits, multiply: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor
) -> torch.Tensor:
    """`multiply(rows)`, [rows, in] to [rows, out], with as many at once as may be."""
    if limits.most is not None and len(rows) > limits.most:
        parts = rows.split(limits.most)
        return torch.cat([multiply_within(limits, multiply, part) for part in parts])
    spare = limits.fewest - len(rows)
    if spare > 0:
        return multiply(pad(rows, (0, 0, 0, spare)))[:-spare]
    return multiply(rows)


@torch.no_grad()
def find_row_limits(layer: Linear, dtype: torch.dtype) -> RowLimits:
    """Within which numbers of rows a layer without limits gives each the same bits.

    Args:
        layer: The layer.
        dtype: Of what it takes.
    """
    counts = _COUNTS if layer.out_features < _WIDE else _COUNTS_WHERE_WIDE
    compared = min(64, -(-_TRIED // layer.out_features))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(compared + counts[-1], layer.in_features, generator=generator).to(dtype)

    def first_rows(count: int) -> torch.Tensor:
        parts = rows[: -(-compared // count) * count].split(count)
        return torch.cat([layer(part) for part in parts])[:compared]

    results = {count: first_rows(count) for count in counts}
    # With AMX one result in ten thousand shows it, so the trial alone might miss it.
    tiled = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    all_limits = itertools.product((32, 16) if tiled else (None, 32, 16), (1, 2, 4, 8, 16))

    def are_alike(limits: RowLimits) -> bool:
        within = [
            result
            for count, result in results.items()
            if limits.fewest <= count and (limits.most is None or count <= limits.most)
        ]
        return all(torch.equal(within[0], result) for result in within[1:])

    # At the end, 16 rows and no other number: those are always alike.
    return next(filter(are_alike, (RowLimits(fewest, most) for most, fewest in all_limits)))
