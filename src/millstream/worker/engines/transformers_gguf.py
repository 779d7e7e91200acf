# pyright: basic
"""GGUF files: unpacked once into a folder that transformers reads in a moment."""

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.integrations.gguf.reader import read_gguf_metadata

from millstream.shared.errors import SettingsError
from millstream.worker.engines.conversions import conversion, find_conversion

logger = logging.getLogger(__name__)

_MAGIC = b"GGUF"
_VERSION = f"{transformers.__version__}+1"
"""Of who converts; after the plus sign: how often `_convert` was changed to make something else."""
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""`tokenizer.ggml.pre` of vocabularies that were learned from each digit by itself and, between
digits, GPT-2's words. transformers takes GPT-2's words for whatever it does not know, as these.

Source of this and the next: `llama-vocab.cpp` in llama.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM and _GPT2.
"""
_AS_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "exaone4", "trillion"}
"""What transformers does not know either, but has right."""


def unpacked(
    file: Path, dtype: torch.dtype, on_progress: Callable[[str], None]
) -> AbstractContextManager[Path]:
    """The folder with the file's model in `dtype`, converted if need be; to be loaded within.

    Raises:
        SettingsError: this is no GGUF file, or one that transformers cannot convert.
        OSError: the cache folder cannot be written.
    """
    _check_magic(file)

    def convert(folder: Path) -> None:
        on_progress("converting weights")
        _convert(file, dtype, folder, on_progress)

    return conversion(
        file,
        dtype=str(dtype).removeprefix("torch."),
        version=_VERSION,
        convert=convert,
    )


def read_config(file: Path, dtype: torch.dtype) -> PreTrainedConfig:
    """The configuration of the file's model; from its converted copy, where it has one.

    Raises:
        SettingsError: this is no GGUF file.
        Exception: whatever transformers says of one that it cannot read.
    """
    _check_magic(file)
    name = str(dtype).removeprefix("torch.")
    folder = find_conversion(file, dtype=name, version=_VERSION)
    if folder is not None:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)


def read_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """The file's tokenizer, which splits a text as the one it was made from does.

    Raises:
        Exception: whatever transformers says of one that it cannot read.
    """
    source = {"gguf_file": file.name, "local_files_only": True}
    metadata, _ = read_gguf_metadata(str(file))
    split = metadata.get("tokenizer.ggml.pre")
    if metadata.get("tokenizer.ggml.model") == "gpt2" and split in _DIGITS_APART:
        # Not the architecture's own class: loaded from the copy, that would make its own split.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, **source)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        return tokenizer
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    known = tokenizer.backend_tokenizer.pre_tokenizer
    if isinstance(known, pre_tokenizers.ByteLevel) and split not in _AS_GPT2:
        logger.info("%s: text is split as for GPT-2; unknown pre-tokenizer %s", file.name, split)
    return tokenizer


def _check_magic(file: Path) -> None:
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise SettingsError(f"{file} is not a GGUF file; set MILLSTREAM_MODEL_SOURCE anew.")


def _convert(
    file: Path, dtype: torch.dtype, folder: Path, on_progress: Callable[[str], None]
) -> None:
    from transformers import AutoModelForCausalLM

    try:
        with _read_once(), _shown(on_progress):
            tokenizer = read_tokenizer(file)
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=dtype, local_files_only=True
            )
    except Exception as error:  # a broken file fails in as many ways as it has fields
        logger.debug("conversion failed", exc_info=True)
        reason = str(error).strip().partition("\n")[0]
        raise SettingsError(
            f"{file} cannot be converted ({type(error).__name__}: {reason}); "
            "is it whole, and its architecture one that transformers knows?"
        ) from error
    # The weights are plain tensors by now, but the model remembers where it came from, and
    # `save_pretrained` refuses quantized GGUF models.
    model.__dict__.pop("hf_quantizer", None)
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model, tokenizer
    gc.collect()


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Within, the metadata of a GGUF file is parsed once.

    transformers reads it three times (configuration, tokenizer, weights) and asks for the map of
    tensor names once a module; either takes seconds, and gives the same every time.
    """
    import gguf

    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader = functools.lru_cache(maxsize=1)(reader)
    gguf.get_tensor_name_map = functools.lru_cache(maxsize=8)(name_map)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map


@contextlib.contextmanager
def _shown(on_progress: Callable[[str], None]) -> Iterator[None]:
    """Within, transformers' progress bar over the tensors goes to `on_progress`."""
    from transformers import modeling_gguf_pytorch_utils

    def bar(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        shown = 0
        for done, tensor in enumerate(tensors):
            percent = 100 * done // len(tensors)
            if percent >= shown + 10:
                shown = percent
                on_progress(f"converting weights {percent} %")
            yield tensor

    names = modeling_gguf_pytorch_utils.__dict__
    original, names["tqdm"] = names["tqdm"], bar
    try:
        yield
    finally:
        names["tqdm"] = original
