"""MODEL_SOURCE: what loads, what is kept, and what an operator is told."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from tests.support.transformers_tiny import write_tiny_gguf, write_tiny_model

from millstream.shared.errors import SettingsError
from millstream.worker.engines import (
    conversions,
    transformers_gguf as gguf,
    transformers_source as sources,
)
from millstream.worker.engines.base import EngineSettings

pytestmark = pytest.mark.timeout(120)  # the first import of transformers takes its time


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A cache folder of the test's own, and no network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(socket.socket, "connect", _no_network)
    return tmp_path / "cache" / "millstream" / "models"


def _no_network(*_):
    raise AssertionError("a local model must not ask the network")


def load(source, **changes) -> sources.LoadedModel:
    return sources.load_model(EngineSettings(model="tiny", source=str(source), **changes))


def refusal(source, **changes) -> str:
    with pytest.raises(SettingsError) as caught:
        load(source, **changes)
    message = caught.value.message
    assert "\n" not in message
    assert "Traceback" not in message
    return message


def test_a_local_folder_loads_without_a_word(tmp_path, capfd):
    source = write_tiny_model(tmp_path / "model")
    capfd.readouterr()  # saving it shows its progress
    loaded = load(source)
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training
    assert loaded.eos_token_ids == (2,)
    assert capfd.readouterr() == ("", "")


def test_all_end_tokens_count(tmp_path):
    assert load(write_tiny_model(tmp_path / "model", eos=[1, 7])).eos_token_ids == (1, 2, 7)


def test_a_model_without_end_tokens_but_the_tokenizers(tmp_path):
    assert load(write_tiny_model(tmp_path / "model", eos=None)).eos_token_ids == (2,)


def test_what_its_makers_suggest_is_told(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    assert load(folder).suggested_sampling == {}
    suggested = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0, "max_length": 9}
    (folder / "generation_config.json").write_text(json.dumps(suggested))
    assert load(folder).suggested_sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 0}
    # What the API would refuse helps nobody.
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 3.5, "top_p": 0.9}))
    assert load(folder).suggested_sampling == {"top_p": 0.9}


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_dtype_is_taken(tmp_path, name):
    loaded = load(write_tiny_model(tmp_path / "model"), dtype=name)
    assert loaded.model.dtype == getattr(torch, name)


def test_a_gguf_file_is_converted_once(tmp_path, cache, capfd):
    file = write_tiny_gguf(tmp_path / "tiny.Q4_1.gguf")
    told: list[str] = []
    first = load(file, on_progress=told.append)
    assert told[0] == "converting weights"
    assert capfd.readouterr() == ("", "")
    told.clear()
    second = load(file, on_progress=told.append)
    assert "converting weights" not in told
    for one, other in zip(
        first.model.state_dict().values(), second.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)
    assert second.tokenizer.chat_template == first.tokenizer.chat_template
    assert second.eos_token_ids == (2,)
    folders = [path for path in cache.iterdir() if path.is_dir()]
    assert len(folders) == 1
    assert folders[0].name.startswith("tiny.Q4_1-")


def test_another_dtype_or_content_is_another_copy(tmp_path, cache):
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    load(file)
    load(file, dtype="bfloat16")
    changed = bytearray(file.read_bytes())
    changed[-5] ^= 1
    status = file.stat()
    file.write_bytes(changed)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # as some packages leave it
    load(file)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 3


def test_a_conversion_that_broke_off_is_never_used(tmp_path, cache, monkeypatch):
    file = write_tiny_gguf(tmp_path / "tiny.gguf")

    def half(source, dtype, folder, on_progress):
        (folder / "config.json").write_text("{")
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(gguf, "_convert", half)
        assert "No space left" in refusal(file)
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    load(file)


def test_what_a_killed_conversion_left_is_removed(tmp_path, cache):
    old, young = cache / ".converting-old", cache / ".converting-young"
    for left in (old, young):
        left.mkdir(parents=True)
    os.utime(old, (0, 0))
    load(write_tiny_gguf(tmp_path / "tiny.gguf"))
    assert not old.exists()
    assert young.exists()


def test_two_workers_that_start_at_once_both_succeed(tmp_path, cache):
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    program = (
        "import sys, torch; from pathlib import Path;"
        "from millstream.worker.engines.transformers_gguf import unpacked;"
        "print(unpacked(Path(sys.argv[1]), torch.float32, lambda _: None).__enter__())"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(file)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    folders = {process.communicate(timeout=100)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(folders) == 1
    assert Path(folders.pop(), "model.safetensors").is_file()
    assert not list(cache.glob(".converting-*"))


def copies(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.is_dir()}


def test_a_file_that_is_installed_again_is_not_converted_again(tmp_path, cache):
    load(write_tiny_gguf(tmp_path / "tiny.gguf"))
    (made,) = copies(cache)
    again = tmp_path / "another" / "tiny.gguf"
    again.parent.mkdir()
    again.write_bytes((tmp_path / "tiny.gguf").read_bytes())
    os.utime(again, (1, 1))
    load(again)
    assert copies(cache) == {made}


def test_what_older_versions_made_of_a_file_is_removed(tmp_path, cache, monkeypatch):
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    other = "tiny-two-0123456789abcdef"
    for name in ("tiny-0123456789abcdef", other, "tinier-0123456789abcdef"):
        (cache / name).mkdir(parents=True)
    convert = {"dtype": "float32", "convert": lambda folder: (folder / "x").touch()}
    names = {}
    for version in ("4.9.1", "4.10.0", "4.2.0"):
        with conversions.conversion(file, version=version, **convert) as folder:
            names[version] = folder.name
    with conversions.conversion(
        file, version="5.0", dtype="bfloat16", convert=convert["convert"]
    ) as folder:
        half = folder.name
    # 4.2.0 came last, and a newer one's stays.
    left = {other, "tinier-0123456789abcdef", half}
    assert copies(cache) == {*left, names["4.10.0"], names["4.2.0"]}
    # One that is being loaded is left to the next.
    with conversions.conversion(file, version="4.10.0", **convert):
        with conversions.conversion(file, version="4.11.0", **convert) as folder:
            names["4.11.0"] = folder.name
        assert copies(cache) == {*left, names["4.10.0"], names["4.11.0"]}
    with conversions.conversion(file, version="4.12.0", **convert) as folder:
        assert copies(cache) == {*left, folder.name}
        assert {path.name for path in cache.glob("*.lock")} == {
            f"{name}.lock" for name in (half, folder.name)
        }


def test_a_rename_that_comes_second_keeps_the_first(tmp_path):
    first, second, target = (tmp_path / name for name in ("a", "b", "target"))
    for folder in (first, second):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    conversions._publish(first, target)
    conversions._publish(second, target)
    assert (target / "config.json").read_text() == "a"


def test_missing_file(tmp_path):
    assert "no such file" in refusal(tmp_path / "gone.gguf")
    assert "no such file" in refusal("./gone")
    assert "no such file" in refusal("a b/c d")


def test_not_a_gguf_file(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"\x00" * 100)
    assert "not a GGUF file" in refusal(tmp_path / "bad.gguf")


def test_a_gguf_file_cut_short(tmp_path):
    whole = write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    for size in (10, 500, len(whole) // 2, len(whole) - 50):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        assert "cannot be converted" in refusal(tmp_path / "cut.gguf")


def test_a_folder_that_is_no_model(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no config.json, no weights" in refusal(tmp_path / "empty")
    folder = write_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\x00" * 64)
    assert "cannot be loaded" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "cannot be loaded" in refusal(folder)


def test_a_reason_that_is_a_list_is_told_to_its_end(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "dict.txt").write_text("of no use")
    told = refusal(folder)
    assert "one of: (1) a `tokenizers` library serialization file, (2) a slow " in told
    assert told.endswith(". Is it whole, and a causal language model?")


def test_code_of_the_models_own_needs_trust(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "never_heard_of"
    config["auto_map"] = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForCausalLM": "own.OwnModel",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('ran')\n")
    assert "MILLSTREAM_TRUST_REMOTE_CODE" in refusal(folder)


def test_a_hub_id_that_cannot_be_reached(monkeypatch):
    import huggingface_hub.constants

    # What HF_HUB_OFFLINE does, which is read once, at import.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "hub" in refusal("nobody/never-made-this")


def test_unknown_device_and_dtype(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    assert "MILLSTREAM_DEVICE" in refusal(folder, device="warp-drive")
    assert "MILLSTREAM_DTYPE" in refusal(folder, dtype="int3")
    if not torch.cuda.is_available():
        assert "MILLSTREAM_DEVICE" in refusal(folder, device="cuda")


@pytest.mark.parametrize("supported", [True, False])
def test_a_gpu_computes_in_16_bits(monkeypatch, supported):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: supported)
    expected = torch.bfloat16 if supported else torch.float16
    assert sources.choose_dtype("auto", torch.device("cuda", 0)) == expected


def test_automatic_choices():
    assert sources.choose_dtype("auto", torch.device("cpu")) == torch.float32
    assert sources.choose_device("cpu") == torch.device("cpu")
