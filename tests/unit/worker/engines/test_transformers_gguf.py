"""Tokenizers of GGUF files: texts are split as the file says, also from the converted copy."""

import logging
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers
from tests.support.transformers_tiny import write_tiny_gguf

from millstream.worker.engines.base import EngineSettings
from millstream.worker.engines.conversions import conversion
from millstream.worker.engines.transformers_gguf import read_tokenizer
from millstream.worker.engines.transformers_source import load_model

pytestmark = pytest.mark.timeout(120)  # the first import of transformers takes its time

TEXT = "a\n\n12  34 b"
GPT2 = ["a", "\n", "\n", "12", " ", " 34", " b"]
LLAMA3 = ["a", "\n\n", "12", " ", " ", "34", " b"]
DIGITS_APART = ["a", "\n\n", "1", "2", "  ", "3", "4", " b"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def load(file: Path):
    return load_model(EngineSettings(model="tiny", source=str(file))).tokenizer


def words(tokenizer) -> list[str]:
    pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
    return [TEXT[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(TEXT)]


@pytest.mark.parametrize("architecture", ["llama", "starcoder2"])  # whose class has its own split
@pytest.mark.parametrize("name", ["smollm", "starcoder", "refact", "command-r"])
def test_text_is_split_as_the_file_says(tmp_path, name, architecture):
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file, architecture=architecture, pre_tokenizer=name)
    assert words(read_tokenizer(file)) == DIGITS_APART
    assert words(load(file)) == DIGITS_APART


@pytest.mark.parametrize(
    ("name", "split", "told"),
    [
        ("gpt-2", GPT2, False),
        ("llama-bpe", LLAMA3, False),
        ("no-such", GPT2, True),
        (None, GPT2, True),
    ],
)
def test_other_splits_are_those_of_transformers(tmp_path, caplog, name, split, told):
    file = write_tiny_gguf(tmp_path / "tiny.gguf", pre_tokenizer=name)
    with caplog.at_level(logging.INFO, logger="millstream"):
        assert words(load(file)) == split
    assert (f"unknown pre-tokenizer {name}" in caplog.text) == told


def test_a_copy_that_was_split_otherwise_is_not_used(tmp_path):
    """Such as versions before this one made."""
    file = write_tiny_gguf(tmp_path / "tiny.gguf", pre_tokenizer="smollm")
    with conversion(
        file,
        dtype="float32",
        version=transformers.__version__,
        convert=lambda folder: (folder / "config.json").touch(),
    ) as old:
        pass
    assert words(load(file)) == DIGITS_APART
    assert not old.exists()
