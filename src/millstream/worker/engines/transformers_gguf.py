# pyright: basic
"""GGUF files: unpacked once into a folder that transformers reads in a moment."""

import contextlib
import functools
import gc
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from millstream.shared.errors import SettingsError

try:
    import fcntl
except ImportError:  # Windows: two workers that start at once both convert, and one result stays
    fcntl = None

logger = logging.getLogger(__name__)

_MAGIC = b"GGUF"
_SAMPLE = 65536
_STALE_S = 3600
"""A conversion takes seconds to minutes; a temporary folder older than this was left by a crash."""


def models_folder() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/millstream/models`."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return base / "millstream" / "models"


def unpack(file: Path, dtype: torch.dtype, on_progress: Callable[[str], None]) -> Path:
    """The folder with the file's model in `dtype`, converted if it was not yet.

    Safe against other workers that do the same at the same time, and against a crash: the folder
    appears whole, or not at all.

    Raises:
        SettingsError: this is no GGUF file, or one that transformers cannot convert.
        OSError: the cache folder cannot be written.
    """
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise SettingsError(f"{file} is not a GGUF file; set MILLSTREAM_MODEL_SOURCE anew.")
    root = models_folder()
    target = root / f"{file.stem}-{_fingerprint(file, dtype)}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    on_progress("converting weights")
    with _one_at_a_time(target.with_name(f"{target.name}.lock")):
        if not target.is_dir():
            _remove_stale(root)
            temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=root))
            try:
                _convert(file, dtype, temporary, on_progress)
                _publish(temporary, target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return target


def _fingerprint(file: Path, dtype: torch.dtype) -> str:
    """Names what the conversion depends on.

    Beside size and time it takes samples of the content: models of one family have files of one
    size, and some package formats give every file the same time.
    """
    status = file.stat()
    digest = hashlib.sha256(
        f"{status.st_size} {status.st_mtime_ns} {transformers.__version__} {dtype}".encode()
    )
    with file.open("rb") as opened:
        for start in (0, status.st_size // 2, max(0, status.st_size - _SAMPLE)):
            opened.seek(start)
            digest.update(opened.read(_SAMPLE))
    return digest.hexdigest()[:16]


def _convert(
    file: Path, dtype: torch.dtype, folder: Path, on_progress: Callable[[str], None]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": file.name, "local_files_only": True}
    try:
        with _read_once(), _shown(on_progress):
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
            model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **source)
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


def _publish(temporary: Path, target: Path) -> None:
    """Give the folder its name, once its bytes are on the disk: a rename can outrun them."""
    for path in temporary.iterdir():
        with path.open("rb") as written:
            os.fsync(written.fileno())
    temporary.chmod(0o755)
    try:
        temporary.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        # Another worker was first; its folder has the same content.


def _remove_stale(root: Path) -> None:
    for left in root.glob(".converting-*"):
        with contextlib.suppress(OSError):  # another worker removes it too
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Wait for another worker that converts the same file; the lock ends with its holder."""
    if fcntl is None:
        yield
        return
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
