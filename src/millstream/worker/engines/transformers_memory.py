# pyright: basic
"""How large the KV cache may be on this machine.

Left alone, the manager plans with 60 % of all memory, whatever else runs there and whatever the
container's limit is. This plans with what is free, and takes no more than the tasks can use.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from transformers import PretrainedConfig
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from millstream.shared.errors import SettingsError

_CGROUP = Path("/sys/fs/cgroup")

_PAGE_TOKENS = 32
"""Prompts share their beginnings in whole pages, so small ones share more."""
_FLASH_PAGE_TOKENS = 256
"""What flash attention's paged kernel asks for."""
_BATCH_TOKENS = {"cpu": 256, "mps": 512}
"""Tokens a step may take in. Others wait while one prompt is read: 256 of a 135M model are 0.3 s
on two cores."""
_GPU_BATCH_TOKENS = 2048
TYPICAL_TOKENS = 640
"""Where memory is shared with everything else on the machine, a task counts as that long: a
question of 128 and an answer of 512. Longer ones take the room of shorter ones, or wait."""
_LONG_TASK_TOKENS = 8192
"""On such a machine a single task may be this long, if memory allows."""
_LEAST_TOKENS = 256
"""Less cache than this serves nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """What the manager is told; in tokens, and in pages of tokens."""

    page_tokens: int
    pages: int
    batch_tokens: int
    bytes_per_token: int
    """With its share of what a step needs."""

    @property
    def cache_tokens(self) -> int:
        """What the cache holds over all requests."""
        return self.pages * self.page_tokens


def plan_cache(
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_concurrent: int,
    flash: bool,
    available_bytes: int,
    cache_tokens: int | None,
) -> CachePlan:
    """Size the cache for a loaded model.

    Args:
        config: The text model's configuration.
        dtype: Of weights, activations and cache.
        device: Where they are.
        max_concurrent: How many requests run at once.
        flash: Whether flash attention runs, which needs no mask.
        available_bytes: From `available_memory`, with the model loaded.
        cache_tokens: To set the size by hand.

    Raises:
        SettingsError: there is no room for a useful cache.
    """
    page_tokens = _FLASH_PAGE_TOKENS if flash else _PAGE_TOKENS
    batch_tokens = max(_BATCH_TOKENS.get(device.type, _GPU_BATCH_TOKENS), max_concurrent)
    per_token = _bytes_per_token(config, dtype, batch_tokens, flash=flash)
    if cache_tokens is None:
        wanted = max_concurrent * context_tokens(config)
        if device.type in _BATCH_TOKENS:
            longest = min(context_tokens(config), _LONG_TASK_TOKENS)
            wanted = max(max_concurrent * TYPICAL_TOKENS, longest)
        possible = available_bytes // per_token
        if possible < _LEAST_TOKENS:
            raise SettingsError(
                f"The {_megabytes(available_bytes)} MB that are left to the KV cache beside the "
                f"model do not hold {_LEAST_TOKENS} tokens of {per_token} bytes; free memory, or "
                "choose a smaller model or MILLSTREAM_DTYPE=bfloat16."
            )
        cache_tokens = min(wanted, possible)
    return CachePlan(
        page_tokens=page_tokens,
        pages=max(1, int(cache_tokens) // page_tokens),
        batch_tokens=batch_tokens,
        bytes_per_token=per_token,
    )


def context_tokens(config: PretrainedConfig) -> int:
    """How long a text the model is made for, with the answer."""
    return getattr(config, "max_position_embeddings", None) or _LONG_TASK_TOKENS


def available_memory(device: torch.device, *, weights: int = 0) -> int:
    """Bytes that a cache on this device may take; `weights` are still to be loaded."""
    free = max(0, free_memory(device) - weights)
    if device.type == "cuda":
        return int(free * 0.85)  # the rest: logits and activations of a step, fragmentation
    # Half: other workers start at the same time, and the API and Redis need memory as well.
    return free // 2


def free_memory(device: torch.device) -> int:
    """Bytes that nobody has taken, neither on the machine nor of this container's share."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    limit = _cgroup_bytes("memory.max")
    return free if limit is None else max(0, min(free, limit - _cgroup_use()))


def choose_threads() -> tuple[int, str]:
    """How many threads compute on a CPU, and where that number is from.

    torch counts the machine's cores; under a CPU quota its threads would wait for each other.
    """
    threads, cores = torch.get_num_threads(), _quota_cores()
    if cores is not None and cores < threads:
        return cores, "the container's CPU quota"
    named = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else "the machine's cores"
    return threads, named


def _quota_cores() -> int | None:
    """How many cores the container may use, or None where it may use all."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, round(int(quota) / int(period)))


def _bytes_per_token(
    config: PretrainedConfig, dtype: torch.dtype, batch_tokens: int, *, flash: bool
) -> int:
    """What one token of cache costs: its keys and values, and its share of a step's tensors."""
    heads, head_dim = find_num_key_value_heads(config), find_head_dim(config)
    kept = config.num_hidden_layers * 2 * heads * head_dim * dtype.itemsize
    # A step reads all keys and values of one layer at once, repeated for each query head when
    # there is no flash kernel, and masks every query token against every cached one.
    read = 2 * heads if flash else 2 * config.num_attention_heads + heads
    mask = 0 if flash else batch_tokens * dtype.itemsize
    return kept + read * head_dim * dtype.itemsize + mask


def _cgroup_use() -> int:
    """Bytes this container uses, without the files that the kernel can drop from memory."""
    used = _cgroup_bytes("memory.current") or 0
    with contextlib.suppress(OSError, ValueError):
        for line in (_CGROUP / "memory.stat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "inactive_file":
                return max(0, used - int(count))
    return used


def _cgroup_bytes(name: str) -> int | None:
    """A number of this container's memory controller (cgroup v2), or None where there is none."""
    try:
        return int((_CGROUP / name).read_text())
    except (OSError, ValueError):
        return None


def _megabytes(count: int) -> int:
    return count // 1_000_000
