"""Settings fail loudly."""

from pathlib import Path

import pytest

from millstream.shared.errors import SettingsError
from millstream.shared.settings import name_of_source, read_settings


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_defaults_need_nothing() -> None:
    settings = read_settings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert settings.model_name == "smollm2-135m-instruct"


def test_keepalives_come_before_proxies_cut() -> None:
    """The shortest idle limits in use are 15 to 30 s (FAULTS B62)."""
    assert read_settings().keepalive_s < 15


def test_environment_then_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_PORT", "9000")
    monkeypatch.setenv("MILLSTREAM_ENGINE", "fake")
    assert read_settings().port == 9000
    assert read_settings({"port": 9001}).port == 9001
    assert read_settings().model_name == "fake"


def test_the_environment_wins_over_the_file_unless_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text(
        "MILLSTREAM_PORT=9000\nMILLSTREAM_SHARDS=3\nexport millstream_host='::1' # here\n"
        "MILLSTREAM_LEASE_S=\nMILLSTREAM_ALLOW_ANONYMOUS=yes\nMILLSTREAM_MODEL\n"
    )
    monkeypatch.setenv("MILLSTREAM_PORT", "")
    monkeypatch.setenv("Millstream_Shards", "2")
    settings = read_settings({"max_queue": 7})
    assert (settings.port, settings.shards, settings.host) == (9000, 2, "::1")
    assert (settings.lease_s, settings.allow_anonymous, settings.model) == (10, True, "")
    assert settings.max_queue == 7


@pytest.mark.parametrize(
    ("name", "hint"),
    [("MILLSTREAM_MAX_CONCURENT", "MILLSTREAM_MAX_CONCURRENT"), ("MILLSTREAM_XYZZY", "")],
)
def test_a_misspelt_name_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, hint: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError) as refused:
        read_settings()
    assert name in refused.value.message
    assert hint in refused.value.message


def test_a_misspelt_name_in_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("MILLSTREAM_PROT=1\nOTHER=2\n")
    with pytest.raises(SettingsError, match=r"MILLSTREAM_PROT is not a setting.*MILLSTREAM_PORT"):
        read_settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "70000"),
        ("LEASE_S", "0"),
        ("MAX_QUEUE", "many"),
        ("ENGINE", "gpt"),
        ("REDIS_URL", "http://x"),
        ("LEASE_S", "nan"),
    ],
)
def test_a_bad_value_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"MILLSTREAM_{name}", value)
    with pytest.raises(SettingsError) as refused:
        read_settings()
    assert refused.value.message.startswith(f"MILLSTREAM_{name}='{value}': ")
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("bundled", "smollm2-135m-instruct"),
        ("HuggingFaceTB/SmolLM2-360M-Instruct", "smollm2-360m-instruct"),
        ("/models/Qwen.Q4_K_M.gguf", "qwen.q4_k_m"),
        ("/models/llama/", "llama"),
    ],
)
def test_a_model_is_named_after_its_source(source: str, name: str) -> None:
    assert name_of_source(source) == name
