"""Options and settings become processes."""

from pathlib import Path

import pytest

from millstream.fleet.plan import Model, api_specs, choose_models, parse_model, worker_specs
from millstream.shared.errors import SettingsError
from millstream.shared.settings import Settings


@pytest.mark.parametrize(
    ("text", "engine", "model"),
    [
        ("small=bundled", "transformers", Model("small", "bundled")),
        ("org/name=/models/x.gguf", "transformers", Model("org/name", "/models/x.gguf")),
        ("bundled", "transformers", Model("smollm2-135m-instruct", "bundled")),
        ("Org/Big-Model", "transformers", Model("big-model", "Org/Big-Model")),
        ("/models/Tiny.gguf", "transformers", Model("tiny", "/models/Tiny.gguf")),
        ("any", "fake", Model("any", "bundled")),
    ],
)
def test_models(text: str, engine: str, model: Model) -> None:
    assert parse_model(text, engine=engine) == model


@pytest.mark.parametrize("text", ["=bundled", "name=", "="])
def test_half_a_model_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="NAME=SOURCE"):
        parse_model(text, engine="transformers")


def test_a_folder_with_an_equals_sign_is_a_source(tmp_path: Path) -> None:
    folder = tmp_path / "lr=3"
    folder.mkdir()
    assert parse_model(str(folder), engine="transformers") == Model("lr=3", str(folder))


def test_without_models_the_settings_say_which() -> None:
    assert choose_models([], Settings(engine="fake")) == [Model("fake", "bundled")]
    settings = Settings(model="mine", model_source="/models/mine")
    assert choose_models([], settings) == [Model("mine", "/models/mine")]


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(SettingsError, match="two models are called a"):
        choose_models(["a=bundled", "a=/b"], Settings())


def test_pods_know_the_only_model(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(host="0.0.0.0")
    one, two = api_specs(settings, [Model("a", "x")], ports=[8000, 8001], redis_url="unix:///r")
    assert (one.name, two.name) == ("api-0", "api-1")
    assert one.command[-1] == "api"
    assert dict(two.environment) == {
        "MILLSTREAM_REDIS_URL": "unix:///r",
        "MILLSTREAM_HOST": "0.0.0.0",
        "MILLSTREAM_PORT": "8001",
        "MILLSTREAM_ENGINE": "transformers",
        "MILLSTREAM_MODEL": "a",
    }
    (pod,) = api_specs(settings, [Model("a", "x"), Model("b", "y")], ports=[1], redis_url="r")
    assert pod.environment["MILLSTREAM_MODEL"] == ""


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    models = [Model("a", "x"), Model("b", "y")]
    specs = worker_specs(Settings(), models, per_model=2, redis_url="r")
    assert [spec.name for spec in specs] == ["worker-0", "worker-1", "worker-2", "worker-3"]
    assert [spec.environment["MILLSTREAM_MODEL"] for spec in specs] == ["a", "a", "b", "b"]
    assert specs[3].environment["MILLSTREAM_MODEL_SOURCE"] == "y"
    assert specs[0].environment["OMP_NUM_THREADS"] == "2"
    (alone,) = worker_specs(Settings(), models[:1], per_model=1, redis_url="r")
    assert "OMP_NUM_THREADS" not in alone.environment
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    kept = worker_specs(Settings(), models, per_model=2, redis_url="r")[0]
    assert "OMP_NUM_THREADS" not in kept.environment
