"""Whether a folder holds all that a model consists of, told by its files' names in a moment.

Only what no loader could do without is asked for. Whatever is unusual, the loader decides on.
"""

import json
import re
from pathlib import Path
from typing import Any, cast

from millstream.shared.errors import SettingsError

_ADAPTER = "adapter_config.json"
"""Its weights may lie elsewhere, where only the loader finds them."""
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""What transformers looks for, in its order."""
_WEIGHTS_SUFFIXES = (".safetensors", ".bin")
_SHARD = re.compile(r"((?:pytorch_)?model)-\d+-of-\d+(\.safetensors|\.bin)")
VOCABULARY = re.compile(
    r"vocab|merges|spiece|bpe|tekken|tiktoken|tokenization|\.model|\.tokenizer$"
    r"|^tokenizer\.|^dict\.txt$|^byte_maps\.json$"
)
"""Whatever any tokenizer of transformers calls its vocabulary."""
BYTE_TOKENIZERS = ("ByT5", "Canine", "Dia", "Perceiver")
"""How the classes begin that need no vocabulary."""


def check_folder(folder: Path) -> None:
    """Look for configuration, weights and tokenizer, without torch or transformers.

    Raises:
        SettingsError: some are missing; names them.
    """
    try:
        names = {path.name for path in folder.iterdir() if path.is_file()}
    except OSError as error:
        raise SettingsError(f"{folder} cannot be read ({error.strerror}).") from error
    if _ADAPTER in names:
        return
    config = _read(folder / "config.json")
    missing: list[str] = []
    if "config.json" not in names:
        missing.append("no config.json")
    if "transformers_weights" not in config:  # which names them otherwise
        missing += _missing_weights(folder, names)
    if not _has_tokenizer(folder, names, config):
        missing.append("no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    if not missing:
        return
    gguf = min((name for name in names if name.endswith(".gguf")), default=None)
    todo = f"To serve a .gguf file, name it: {folder / gguf}" if gguf else "Is it all there?"
    raise SettingsError(f"{folder} has {_joined(missing)}. {todo}")


def _missing_weights(folder: Path, names: set[str]) -> list[str]:
    chosen = next((name for name in _WEIGHTS if name in names), None)
    if chosen is None:
        shard = next(filter(None, map(_SHARD.fullmatch, sorted(names))), None)
        if shard is not None:
            return [f"no {shard[1]}{shard[2]}.index.json, which joins its shards"]
        if any(name.endswith(_WEIGHTS_SUFFIXES) for name in names):
            return []
        return ["no weights (model.safetensors or pytorch_model.bin, whole or in shards)"]
    weight_map = _read(folder / chosen).get("weight_map") if chosen.endswith(".json") else None
    if not isinstance(weight_map, dict):
        return []
    shards = {str(shard) for shard in cast("dict[str, Any]", weight_map).values()}
    gone = sorted(shard for shard in shards if not (folder / shard).is_file())
    if not gone:
        return []
    more = f" and {len(gone) - 1} more of the shards" if len(gone) > 1 else ""
    return [f"no {gone[0]}{more}, which {chosen} names"]


def _has_tokenizer(folder: Path, names: set[str], config: dict[str, Any]) -> bool:
    return any(VOCABULARY.search(name) for name in names) or any(
        "AutoTokenizer" in str(found.get("auto_map"))
        or str(found.get("tokenizer_class")).startswith(BYTE_TOKENIZERS)
        for found in (_read(folder / "tokenizer_config.json"), config)
    )


def _read(file: Path) -> dict[str, Any]:
    """What a JSON file says; nothing, where it is not there or says nothing."""
    try:
        found: Any = json.loads(file.read_bytes())
    except (OSError, ValueError):  # the loader says more of it
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _joined(items: list[str]) -> str:
    """`a`, `a and b`, or `a, b and c`."""
    *before, last = items
    return f"{', '.join(before)} and {last}" if before else last
