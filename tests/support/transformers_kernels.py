"""What this processor, by torch's word, has kernels for; not by that of the code under test."""

import pytest
import torch

PACKED = {
    "float32": torch.backends.mkldnn.is_available(),
    "bfloat16": torch.backends.mkldnn.is_available()
    and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    "int8": torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported(),
}
"""Whether linear layers of a dtype have kernels."""


def where_packed(*dtypes: str) -> pytest.MarkDecorator:
    """A test for each of these dtypes, skipped where the processor does not have it."""
    return pytest.mark.parametrize(
        "dtype",
        [
            pytest.param(name, marks=pytest.mark.skipif(not PACKED[name], reason=f"no {name}"))
            for name in dtypes
        ],
    )
