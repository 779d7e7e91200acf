"""The command: quick help, one line for every failure, exit codes of the contract."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.faults import busy
from tests.support.ports import free_port

from millstream import __version__
from millstream.fleet import cli
from millstream.fleet.cli import invoke
from millstream.shared.errors import MillstreamError, SettingsError
from millstream.shared.settings import Settings


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("MILLSTREAM_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["--version"]) == 0
    assert capsys.readouterr().out == f"millstream {__version__}\n"
    assert invoke(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in ("up", "api", "worker", "chaos"))
    assert invoke(["up", "--help"]) == 0
    assert "--workers" in capsys.readouterr().out


@pytest.mark.parametrize("group", [[], ["dead"], ["keys"]])
def test_a_group_alone_shows_its_help(capsys: pytest.CaptureFixture[str], group: list[str]) -> None:
    assert invoke([*group, "--help"]) == 0
    told = capsys.readouterr().out
    assert invoke(group) == 2
    assert capsys.readouterr() == ("", told)


def test_help_imports_nothing_heavy() -> None:
    code = """
import sys
from millstream.fleet.cli import invoke
invoke(["--help"])
heavy = {"pydantic", "redis", "rich", "asyncio", "fastapi", "torch", "msgspec"}
sys.exit(len(heavy & set(sys.modules)))
"""
    took = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=20)
        took.append(time.monotonic() - began)
    # 0.1 s on an idle machine; the tests may share theirs.
    assert min(took) < 0.6 * busy()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "No such command 'nothing'. See `millstream --help`."),
        (["up", "--apis", "0"], "0 is not in the range 1<=x<=64. See `millstream up --help`."),
        (["up", "--engine", "steam"], "'steam' is not one of"),
        (["up", "--model", "=x"], "--model =x: give NAME=SOURCE"),
        (["up", "--host", "0.0.0.0"], "anyone who reaches 0.0.0.0 could use the API"),
        (["worker", "--model", "x="], "--model x=: give NAME=SOURCE"),
        (["api", "--port", "99999"], "99999 is not in the range"),
        (["chaos", "--seconds", "1"], "1 is not in the range"),
        (["chaos", "--json", "no/such/x.json"], "there is no folder for no/such/x.json"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("millstream: ")
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["up", "api", "worker"])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("MILLSTREAM_PROT=1", "did you mean MILLSTREAM_PORT?"),
        ("MILLSTREAM_UNKNOWN_THING=1", "MILLSTREAM_UNKNOWN_THING is not a setting of Millstream\n"),
        ("MILLSTREAM_PORT_8000_TCP=1", "for a Service: enableServiceLinks: false in the pod"),
        ("MILLSTREAM_PORT=many", "MILLSTREAM_PORT='many': must be a whole number\n"),
        (
            "MILLSTREAM_URL=here:80",
            "MILLSTREAM_URL='here:80': must begin with http:// or https://\n",
        ),
        (
            "MILLSTREAM_CORS_ORIGINS=https://a.example,https://b.example/",
            "'https://b.example/' is no origin such as https://chat.example:8443, without a path\n",
        ),
        ("MILLSTREAM_REDIS_URL=http://x", "must begin with redis://"),
    ],
)
def test_wrong_settings_are_one_line(
    command: str,
    setting: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(*setting.split("="))
    assert invoke([command]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_sentinel_that_is_not_there_is_one_short_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"redis+sentinel://127.0.0.1:{free_port()}/mymaster"
    monkeypatch.setenv("MILLSTREAM_REDIS_URL", url)
    assert invoke(["up", "--engine", "fake"]) == 2
    assert capsys.readouterr().err == (
        f"millstream: no Redis answers at {url} (no Sentinel answers that knows the master "
        "'mymaster'); start it, or unset MILLSTREAM_REDIS_URL to use the embedded one\n"
    )


def test_options_win_over_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def run(settings: Settings) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setenv("MILLSTREAM_MODEL", "other")
    monkeypatch.setenv("MILLSTREAM_ENGINE", "transformers")
    monkeypatch.setattr("millstream.worker.main.run", run)
    monkeypatch.setattr("millstream.api.server.serve", run)
    assert invoke(["worker", "--model", "a=/b", "--engine", "fake"]) == 0
    assert invoke(["worker"]) == 0
    assert invoke(["api", "--port", "9", "--host", "::", "--model", "m"]) == 0
    assert (seen[0].model, seen[0].model_source, seen[0].engine) == ("a", "/b", "fake")
    assert (seen[1].model, seen[1].model_source) == ("other", "bundled")
    assert (seen[2].port, seen[2].host, seen[2].model) == (9, "::", "m")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (SettingsError("no model in /x"), 2, "millstream: no model in /x\n"),
        (MillstreamError("out of luck"), 1, "millstream: out of luck\n"),
        (
            ModuleNotFoundError("…", name="torch"),
            1,
            "millstream: torch is not installed: run `pip install 'millstream[all]'`, or of [api], "
            "[worker] and [fleet] those this machine needs\n",
        ),
        (KeyboardInterrupt(), 130, "\n"),
    ],
)
def test_failures_of_a_worker(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(_: Settings) -> int:
        raise error

    monkeypatch.setattr("millstream.worker.main.run", run)
    assert invoke(["worker"]) == code
    assert capsys.readouterr().err == line


def test_what_chaos_needs_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("millstream.fleet.chaos")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "openai", None)  # as if it were not installed
    assert invoke(["chaos"]) == 1
    line = "millstream: openai is not installed: run `pip install '.[all,chaos]'`\n"
    assert capsys.readouterr().err == line


def test_exit_codes_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.worker.main.run", lambda _: 7)
    monkeypatch.setattr(sys, "argv", ["millstream", "worker"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 7
