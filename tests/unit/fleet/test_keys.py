"""`millstream keys`: shown once, kept as a hash, one line for every mistake."""

import json
from pathlib import Path

import pytest

from millstream.api.auth.key_file import read_keys
from millstream.api.auth.keyring import Keyring
from millstream.fleet.cli import invoke


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILLSTREAM_API_KEYS_FILE", str(tmp_path / "keys"))
    return tmp_path / "keys"


def test_the_life_of_a_key(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "m", "--priority", "batch", "--limit", "requests_per_min=5", "--days", "3"]
    words += ["--weight", "2.5"]
    assert invoke(["keys", "add", "ann", *words]) == 0
    key, told = capsys.readouterr()
    key = key.strip()
    (record,) = read_keys(file)
    assert told == f"key {record.id} of ann, shown this once:\n"
    ring = Keyring("", file)
    caller = ring.find(key)
    assert caller is not None
    assert (caller.id, caller.models, caller.priorities) == ("key:ann", {"m"}, {"batch"})
    assert (caller.limits.requests_per_min, caller.weight) == (5, 2.5)
    assert file.stat().st_mode & 0o777 == 0o600

    # A second one for the same caller, so that no request fails while one takes the other's place.
    assert invoke(["keys", "add", "ann", "--admin"]) == 0
    second, told = capsys.readouterr()
    assert f"ann has the key {record.id} too" in told
    assert invoke(["keys", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        record.id, "ann", "until", f"{record.expires:%Y-%m-%d}", "models:", "m;", "priorities:",
        "batch;", "weight:", "2.5;", "requests_per_min:", "5",
    ]  # fmt: skip
    assert lines[1].split()[1:] == ["ann", "valid", "admin"]

    assert invoke(["keys", "revoke", record.id]) == 0
    assert capsys.readouterr().err.startswith(f"revoked {record.id};")
    ring = Keyring("", file)
    assert ring.find(key) is None
    assert ring.find(second.strip()) is not None
    assert invoke(["keys", "revoke", "ann"]) == 0
    assert Keyring("", file).find(second.strip()) is None
    capsys.readouterr()
    assert invoke(["keys", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["ann", "ann"]
    assert all(row["revoked"] and "sha256" not in row for row in rows)
    assert key not in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["revoke", "bob"], 1, "no key 'bob' is there to be revoked; see `millstream keys list`"),
        (["add", "a b"], 2, "'a b' cannot be a key's name"),
        (["add", "x" * 65], 2, "cannot be a key's name"),
        (["add", "bob", "--limit", "rpm=1"], 2, "--limit: give NAME=N"),
        (["add", "bob", "--limit", "requests_per_min=-1"], 2, "--limit: give NAME=N"),
        (["add", "bob", "--priority", "vip"], 2, "'vip' is not one of"),
        (["list", "--file", "none"], 2, "none: cannot be read: No such file or directory"),
        (["add", "bob", "--file", "no/where"], 2, "no/where: cannot be written: No such file"),
    ],
)
def test_mistakes(
    file: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    told: str,
) -> None:
    assert invoke(["keys", *arguments]) == code
    out, err = capsys.readouterr()
    assert told in err
    assert (out, err.count("\n")) == ("", 1)
    assert not file.exists() or read_keys(file) == []


def test_no_file_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MILLSTREAM_API_KEYS_FILE", raising=False)
    assert invoke(["keys", "list"]) == 2
    assert "set MILLSTREAM_API_KEYS_FILE, or give --file" in capsys.readouterr().err
