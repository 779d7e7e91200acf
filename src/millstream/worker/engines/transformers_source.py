# pyright: basic
"""From a source of a model to the model, loaded."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers.utils.logging as transformers_logging
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from millstream.shared.errors import SettingsError
from millstream.worker.engines.base import EngineSettings
from millstream.worker.engines.model_source import find_source
from millstream.worker.engines.transformers_gguf import unpacked
from millstream.worker.engines.transformers_int8 import is_quantized, quantize_linears
from millstream.worker.engines.transformers_linear import is_packed, pack_linears
from millstream.worker.engines.transformers_memory import choose_threads

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BUNDLED_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""As its model card has it."""
_SUGGESTIONS: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value <= 2,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value >= 0,
}
"""What is taken from a model's makers, where the API would take it too."""
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.float32,  # but for the weights of linear layers
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, on its device."""

    model: PreTrainedModel
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    """Any of them ends a text."""
    suggested_sampling: dict[str, float]
    """What its makers suggest: `temperature`, `top_p`, `top_k`, those they name."""


def load_model(settings: EngineSettings) -> LoadedModel:
    """Find, convert if need be, and load what the settings name; takes seconds, blocks.

    Raises:
        SettingsError: it cannot be loaded as set; says what to do.
    """
    quiet_libraries()
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    threads, _ = choose_threads()
    torch.set_num_threads(threads)
    options = {"trust_remote_code": settings.trust_remote_code}  # None: it asks on the terminal
    with _folder(settings, dtype) as path:
        # A local model must not ask the hub for anything; a hub id must.
        options["local_files_only"] = isinstance(path, Path)
        settings.on_progress("loading weights")
        model, tokenizer = explained(
            settings.source, lambda: _load(str(path), dtype, device, options)
        )
    if settings.dtype == "int8":
        quantize_linears(model)
    else:
        pack_linears(model)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=_eos(model, tokenizer),
        suggested_sampling=_suggested_sampling(settings.source, model),
    )


@contextlib.contextmanager
def _folder(settings: EngineSettings, dtype: torch.dtype) -> Iterator[Path | str]:
    """What transformers can load, as long as it takes to load it: a folder, or a hub id."""
    path = find_source(settings.source)
    if isinstance(path, str) or path.is_dir():
        yield path
        return
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(unpacked(path, dtype, settings.on_progress))
        except OSError as error:
            raise SettingsError(
                f"The converted copy of {path} cannot be kept ({error}); "
                "set XDG_CACHE_HOME to a folder with room for it."
            ) from error
        yield folder


def describe_numerics(model: PreTrainedModel) -> str:
    """Name what a model's numbers depend on, such as `cpu/float32/sdpa+onednn/torch-2.13.0`."""
    quantized = is_quantized(model)
    dtype = "int8" if quantized else str(model.dtype).removeprefix("torch.")
    packed = quantized or is_packed(model)
    kernels = str(model.config._attn_implementation) + ("+onednn" if packed else "")
    return f"{model.device.type}/{dtype}/{kernels}/torch-{torch.__version__.partition('+')[0]}"


def choose_device(name: str) -> torch.device:
    """`auto` is cuda, then mps, then cpu.

    Raises:
        SettingsError: torch does not know the device, or does not find it here.
    """
    if name == "auto":
        if torch.cuda.is_available():
            name = "cuda"
        else:
            name = "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SettingsError(
            f"MILLSTREAM_DEVICE={name!r} cannot be used here ({_first_line(error)}); try `auto`."
        ) from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """What values and cache are in; weights too, except of `int8`.

    `auto` is float32, in which a text goes on alike on any worker; on cuda half of that.

    Raises:
        SettingsError: there is no such dtype, or not on this device.
    """
    if name == "auto":
        if device.type != "cuda":
            return torch.float32
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if supported else torch.float16
    if name not in _DTYPES:
        raise SettingsError(f"MILLSTREAM_DTYPE={name!r}: choose auto, {', '.join(_DTYPES)}.")
    if name == "int8" and device.type != "cpu":
        raise SettingsError("MILLSTREAM_DTYPE='int8' is for CPUs; choose auto.")
    return _DTYPES[name]


def quiet_libraries() -> None:
    """Keep progress bars and advice off the terminal; errors go where ours go."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    hub = logging.getLogger("huggingface_hub")
    hub.handlers.clear()  # to stderr, and each line went to ours as well
    hub.setLevel(logging.ERROR)  # it warns of each try; when it gives up, we say so
    batching = logging.getLogger("ContinuousBatchingLogger")
    batching.handlers.clear()  # it brings a handler of its own, to stderr
    batching.propagate = True
    # The engine tells of every failure itself, and a traceback of the library tells no more.
    batching.setLevel(logging.CRITICAL)


def _load(
    path: str, dtype: torch.dtype, device: torch.device, options: dict[str, Any]
) -> tuple[PreTrainedModel, Any]:
    if not options["local_files_only"]:
        # Where the hub does not answer, the tokenizer would try as long a second time.
        AutoConfig.from_pretrained(path, **options)
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    placement = {} if device.type == "cpu" else {"device_map": {"": device}}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **placement, **options)
    return model.eval(), tokenizer


def explained(source: str, load: Callable[[], T]) -> T:
    """Run `load`; every way in which it fails becomes one line for the operator.

    Raises:
        SettingsError: it failed; says what to do.
    """
    try:
        return load()
    except SettingsError:
        raise
    except Exception as error:  # configurations of others: there is no list of what can be raised
        logger.debug("loading failed", exc_info=True)
        reason = _first_line(error)
        if "trust_remote_code" in str(error):
            todo = (
                "It brings code of its own; set MILLSTREAM_TRUST_REMOTE_CODE=true if you trust it."
            )
        elif isinstance(error, OSError):
            todo = (
                "Give a local folder, a .gguf file, `bundled`, or the id of a model that this "
                "machine can fetch from the hub (is it offline? HF_TOKEN opens gated ones)."
            )
        elif isinstance(error, MemoryError | torch.OutOfMemoryError):
            todo = (
                "It does not fit into memory; choose a smaller one, or MILLSTREAM_DTYPE=bfloat16."
            )
        else:
            todo = "Is it whole, and a causal language model?"
        raise SettingsError(
            f"MILLSTREAM_MODEL_SOURCE={source!r} cannot be loaded "
            f"({type(error).__name__}: {reason}). {todo}"
        ) from error


def _eos(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """All ids that end a text: the model's, and the tokenizer's, as vLLM takes them."""
    found: set[int] = set()
    for value in (
        getattr(model.generation_config, "eos_token_id", None),
        getattr(model.config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(value)
    return tuple(sorted(token_id for token_id in found if token_id >= 0))


def _suggested_sampling(source: str, model: PreTrainedModel) -> dict[str, float]:
    """From the model's `generation_config.json`, which a GGUF file has not."""
    if source == "bundled":
        return dict(_BUNDLED_SAMPLING)
    found = {name: getattr(model.generation_config, name, None) for name in _SUGGESTIONS}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, int | float) and _SUGGESTIONS[name](value)
    }


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    line = text.partition("\n")[0].rstrip()
    if line.endswith(":"):  # it begins a list, which is the reason
        line = " ".join(text.split())
    return line or "no reason given"
