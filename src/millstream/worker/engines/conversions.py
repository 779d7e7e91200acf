"""The folder of converted models: each is found by its content, whole or not at all, and no longer
kept once a newer version has made its own."""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from packaging.version import Version

try:
    import fcntl
except ImportError:  # Windows: who starts at once converts twice, one result stays, none is removed
    fcntl = None

_HEAD = 2**24
"""Bytes that are read whole: a GGUF file's metadata are in there."""
_SAMPLES, _SAMPLE = 256, 2**16
_STALE_S = 3600
"""A conversion takes seconds to minutes; a temporary folder older than this was left by a crash."""
_UNNAMED = re.compile(r"-[0-9a-f]{16}")
"""How names ended before they told content, dtype and version apart: nobody looks for those."""


def models_folder() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/millstream/models`."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return base / "millstream" / "models"


@contextlib.contextmanager
def conversion(
    file: Path, *, dtype: str, version: str, convert: Callable[[Path], None]
) -> Generator[Path]:
    """The folder with a file's model in `dtype`; nobody removes it within.

    Safe against other workers that do the same at the same time, and against a crash.

    Args:
        file: What is converted.
        dtype: Of the weights.
        version: Of the library that converts; what an older one has made of this goes.
        convert: Writes the model into an empty folder, if it is not there yet.

    Raises:
        OSError: the folder cannot be written.
        Exception: whatever `convert` raises.
    """
    alike, target = _names(file, dtype, version)
    root = target.parent
    root.mkdir(parents=True, exist_ok=True)
    while True:
        with _locked(target, exclusive=False):
            if target.is_dir():
                yield target
                return
        with _locked(target, exclusive=True):
            if not target.is_dir():
                _make(target, convert)
                for older in _older(root, file.stem, alike, version):
                    _remove(older)


def find_conversion(file: Path, *, dtype: str, version: str) -> Path | None:
    """The folder that `conversion` gives, if it is there already; another may remove it."""
    _, target = _names(file, dtype, version)
    return target if target.is_dir() else None


def _names(file: Path, dtype: str, version: str) -> tuple[str, Path]:
    """How the folders of all versions begin, and this version's."""
    alike = f"{file.stem}-{_content(file)}-{dtype}-"
    return alike, models_folder() / f"{alike}{version}"


def _content(file: Path) -> str:
    """Names a file by its size, its beginning and samples of the rest.

    Not by its time: every installation of a package that brings a model gives it a new one. And
    not by its size alone: models of one family have files of one size.
    """
    size = file.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with file.open("rb") as opened:
        digest.update(opened.read(_HEAD))
        last = max(_HEAD, size - _SAMPLE)
        for number in range(_SAMPLES):
            opened.seek(_HEAD + (last - _HEAD) * number // (_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE))
    return digest.hexdigest()


def _make(target: Path, convert: Callable[[Path], None]) -> None:
    _remove_stale(target.parent)
    temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        convert(temporary)
        _publish(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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


def _older(root: Path, stem: str, alike: str, version: str) -> Iterator[Path]:
    """What older versions have made of the same file, in the same dtype.

    A newer version's stays: two installations that share the folder would convert by turns.
    """
    for folder in [entry for entry in root.iterdir() if entry.is_dir()]:
        if folder.name.startswith(alike):
            if Version(folder.name.removeprefix(alike)) < Version(version):
                yield folder
        elif _UNNAMED.fullmatch(folder.name.removeprefix(stem)):
            yield folder


def _remove(folder: Path) -> None:
    """Remove a conversion, unless a worker loads it; one that has loaded it needs no files."""
    if fcntl is None:
        return
    with contextlib.suppress(OSError), _locked(folder, exclusive=True, wait=False):
        # It goes as it came: at once. A crash in between leaves what the next one removes.
        gone = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        _lock_file(folder).unlink()


def _remove_stale(root: Path) -> None:
    for left in root.glob(".converting-*"):
        with contextlib.suppress(OSError):  # another worker removes it too
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


@contextlib.contextmanager
def _locked(folder: Path, *, exclusive: bool, wait: bool = True) -> Generator[None]:
    """Hold a conversion: many may load it, one may make or remove it; ends with its holder.

    Raises:
        BlockingIOError: another has it, and it is not to be waited for.
    """
    if fcntl is None:
        yield
        return
    with _lock_file(folder).open("a") as held:
        how = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        fcntl.flock(held, how if wait else how | fcntl.LOCK_NB)
        yield
