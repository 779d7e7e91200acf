"""What a model's folder must hold, and what is left to the loader."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.shared.errors import SettingsError
from millstream.worker.engines.model_folder import BYTE_TOKENIZERS, VOCABULARY, check_folder
from millstream.worker.engines.model_source import find_source

WHOLE = ("config.json", "model.safetensors", "tokenizer.json")
NO_WEIGHTS = "no weights (model.safetensors or pytorch_model.bin, whole or in shards)"
NO_TOKENIZER = "no tokenizer (tokenizer.json, tokenizer.model or vocab.json)"


def write(folder: Path, *names: str, **contents: object) -> Path:
    """A folder with these files; of what is named by keyword, `.json` with this content."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_index(folder: Path, name: str, *shards: str) -> None:
    weight_map = {f"layer{number}": shard for number, shard in enumerate(shards)}
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))


def refusal(folder: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        find_source(str(folder))
    return caught.value.message


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ((), f"no config.json, {NO_WEIGHTS} and {NO_TOKENIZER}"),
        (("config.json",), f"{NO_WEIGHTS} and {NO_TOKENIZER}"),
        (("config.json", "tokenizer.json"), NO_WEIGHTS),
        (("config.json", "model.safetensors"), NO_TOKENIZER),
        (("config.json", "model.safetensors", "tokenizer_config.json"), NO_TOKENIZER),
        (("model.safetensors", "tokenizer.json"), "no config.json"),
        (
            ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"),
            "no model.safetensors.index.json, which joins its shards",
        ),
        (
            ("config.json", "tokenizer.json", "pytorch_model-00002-of-00002.bin"),
            "no pytorch_model.bin.index.json, which joins its shards",
        ),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, names: tuple[str, ...], missing: str) -> None:
    folder = write(tmp_path / "half", *names)
    assert refusal(folder) == f"{folder} has {missing}. Is it all there?"


@pytest.mark.parametrize(
    "names",
    [
        WHOLE,
        ("config.json", "pytorch_model.bin", "vocab.json", "merges.txt"),
        ("config.json", "pytorch_model.bin", "vocab.txt"),
        ("config.json", "model.safetensors", "tokenizer.model"),
        ("config.json", "model.safetensors", "tokenizer.model.v3"),
        ("config.json", "model.safetensors", "spiece.model"),
        ("config.json", "model.safetensors", "qwen.tiktoken"),
        ("config.json", "of-another-name.safetensors", "tokenizer.json"),
        ("adapter_config.json", "adapter_model.safetensors"),
    ],
)
def test_what_may_be_whole_is_left_to_the_loader(tmp_path: Path, names: tuple[str, ...]) -> None:
    folder = write(tmp_path / "model", *names)
    assert find_source(str(folder)) == folder


@pytest.mark.parametrize(
    ("index", "shard"),
    [
        ("model.safetensors.index.json", "model-{}-of-00003.safetensors"),
        ("pytorch_model.bin.index.json", "pytorch_model-{}-of-00003.bin"),
    ],
)
def test_shards(tmp_path: Path, index: str, shard: str) -> None:
    folder = write(tmp_path / "model", "config.json", "tokenizer.json")
    shards = [shard.format(number) for number in ("00001", "00002", "00003")]
    write_index(folder, index, *shards)
    write(folder, shards[0])
    named = f"which {index} names. Is it all there?"
    assert refusal(folder) == f"{folder} has no {shards[1]} and 1 more of the shards, {named}"
    write(folder, shards[1])
    assert refusal(folder) == f"{folder} has no {shards[2]}, {named}"
    (folder / shards[2]).symlink_to(tmp_path / "gone")
    assert refusal(folder) == f"{folder} has no {shards[2]}, {named}"
    write(tmp_path, "gone")
    check_folder(folder)
    (folder / shards[0]).unlink()
    write(folder, "model.safetensors")  # which is taken in place of shards
    check_folder(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', ""])
def test_an_index_that_cannot_be_read_is_left_to_the_loader(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path / "model", "config.json", "tokenizer.json")
    (folder / "model.safetensors.index.json").write_text(text)
    check_folder(folder)


def test_what_a_configuration_names_is_left_to_the_loader(tmp_path: Path) -> None:
    own = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
    check_folder(write(tmp_path / "a", *WHOLE[:2], tokenizer_config=own))
    check_folder(write(tmp_path / "b", *WHOLE[1:2], config=own))
    of_bytes = {"tokenizer_class": "ByT5Tokenizer"}
    check_folder(write(tmp_path / "c", *WHOLE[:2], tokenizer_config=of_bytes))
    elsewhere = {"transformers_weights": "x.safetensors"}
    check_folder(write(tmp_path / "d", "tokenizer.json", config=elsewhere))


def test_a_gguf_file_in_a_folder_is_to_be_named_itself(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "b.gguf", "a.gguf")
    assert refusal(folder) == (
        f"{folder} has no config.json, {NO_WEIGHTS} and {NO_TOKENIZER}. "
        f"To serve a .gguf file, name it: {folder}/a.gguf"
    )


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SettingsError) as caught:
        check_folder(file)
    assert caught.value.message == f"{file} cannot be read (Not a directory)."


def test_it_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, millstream.worker.engines.model_source;"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


@pytest.mark.timeout(120)  # the first import of transformers takes its time
def test_every_tokenizer_of_transformers_would_be_found() -> None:
    auto = pytest.importorskip("transformers.models.auto.tokenization_auto")
    known = 0
    names: set[str | None] = set(auto.TOKENIZER_MAPPING_NAMES.values())
    for name in sorted(filter(None, names)):
        try:
            files = getattr(auto.tokenizer_class_from_name(name), "vocab_files_names", None)
        except ImportError:  # it wants a package that is not installed
            continue
        if files is not None and not name.startswith(BYTE_TOKENIZERS):
            assert any(VOCABULARY.search(file) for file in files.values() if file), name
            known += 1
    assert known > 50
