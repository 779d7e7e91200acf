# pyright: basic
"""What a worker would choose for a model on this machine, told without loading any weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from millstream.worker.engines import transformers_memory as memory
from millstream.worker.engines.base import EngineSettings
from millstream.worker.engines.model_source import find_source
from millstream.worker.engines.transformers_batching import flash_version
from millstream.worker.engines.transformers_gguf import read_config
from millstream.worker.engines.transformers_int8 import can_quantize, quantized_bytes
from millstream.worker.engines.transformers_linear import can_pack
from millstream.worker.engines.transformers_source import (
    choose_device,
    choose_dtype,
    explained,
    quiet_libraries,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a worker would run a model with; memory in bytes, cache in tokens."""

    device: str
    dtype: str
    threads: int | None
    """On a CPU."""
    threads_from: str
    bfloat16: bool
    """Whether `bfloat16` has kernels on this CPU."""
    int8: bool
    """Whether `int8` could be had here."""
    weights: int
    free: int
    """Memory that nobody has taken yet, on the device."""
    cache: memory.CachePlan | None
    """None where not even the weights fit."""
    typical: int
    """A question and its answer, as caches on a CPU count them."""
    context: int


def forecast(settings: EngineSettings) -> Forecast | None:
    """Look at this machine as a worker does that starts; None for a model that is not here yet.

    Raises:
        SettingsError: the worker could not start; says what to do.
    """
    quiet_libraries()
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    model = explained(settings.source, lambda: _outline(settings, dtype))
    if model is None:
        return None
    config = model.config.get_text_config()
    threads, threads_from = memory.choose_threads() if device.type == "cpu" else (None, "")
    weights = (
        quantized_bytes(model)
        if settings.dtype == "int8"
        else sum(tensor.nbytes for tensor in model.parameters())
    )
    free = memory.free_memory(device)
    cache = None
    if weights < free:
        cache = memory.plan_cache(
            config,
            dtype=dtype,
            device=device,
            max_concurrent=settings.max_concurrent,
            flash=flash_version(model, device) is not None,
            available_bytes=memory.available_memory(device, weights=weights),
            cache_tokens=None,
        )
    return Forecast(
        device=str(device),
        dtype=settings.dtype if settings.dtype == "int8" else str(dtype).removeprefix("torch."),
        threads=threads,
        threads_from=threads_from,
        bfloat16=device.type == "cpu" and can_pack(torch.bfloat16),
        int8=device.type == "cpu" and can_quantize(),
        weights=weights,
        free=free,
        cache=cache,
        typical=memory.TYPICAL_TOKENS,
        context=memory.context_tokens(config),
    )


def _outline(settings: EngineSettings, dtype: torch.dtype) -> PreTrainedModel | None:
    """The model without its weights, or None for one that only the hub may have."""
    source = find_source(settings.source)
    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    if isinstance(source, Path) and source.is_file():
        config = read_config(source, dtype)
    else:
        try:
            config = AutoConfig.from_pretrained(source, local_files_only=True, **options)
        except OSError:
            if isinstance(source, str):
                return None
            raise
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
