"""Keys: those of the settings, and those of a file that changes while it is read."""

import asyncio
import json
import multiprocessing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from tests.support.waiting import until

from millstream.api.auth import keyring
from millstream.api.auth.caller import PRIORITIES, CallerLimits
from millstream.api.auth.key_file import KeyRecord, change_keys, digest_of, new_key, read_keys
from millstream.api.auth.keyring import Keyring
from millstream.shared.cancellation import cancel_until_done
from millstream.shared.errors import SettingsError

STRONG = "s" * 32


def record(name: str, key: str, **changes: object) -> KeyRecord:
    return KeyRecord(name=name, sha256=digest_of(key).hex(), created=datetime.now(UTC), **changes)  # type: ignore[arg-type]


def write(path: Path, *records: KeyRecord) -> None:
    change_keys(path, lambda _: list(records))


def test_keys_of_the_settings() -> None:
    ring = Keyring(f"ann:{STRONG}, {STRONG}2 ,admin:{STRONG}3,", None)
    ann, nameless, admin = (ring.find(key) for key in (STRONG, f"{STRONG}2", f"{STRONG}3"))
    assert ann is not None
    assert (ann.id, ann.admin, ann.models, ann.priorities) == ("key:ann", False, None, PRIORITIES)
    assert nameless is not None
    assert nameless.id == f"key:{digest_of(f'{STRONG}2').hex()[:12]}"
    assert admin is not None
    assert admin.admin
    for wrong in ("", "ann", f"ann:{STRONG}", STRONG[:-1], f"{STRONG} ", "x" * 9999, "\udcff"):
        assert ring.find(wrong) is None


def test_another_order_of_keys_gives_nobody_anothers_tasks() -> None:
    one, two = Keyring(f"{STRONG}1,{STRONG}2", None), Keyring(f"{STRONG}2,{STRONG}1", None)
    assert one.find(f"{STRONG}1") == two.find(f"{STRONG}1") != two.find(f"{STRONG}2")


@pytest.mark.parametrize("keys", ["ann:", ":x", "a b:c", "ann:se cret", "k€y", "x" * 600, "a/b:c"])
def test_a_bad_key_of_the_settings_is_refused_and_not_shown(keys: str) -> None:
    with pytest.raises(SettingsError, match="MILLSTREAM_API_KEYS: key 2") as refused:
        Keyring(f"{STRONG},{keys}", None)
    assert STRONG not in refused.value.message
    assert keys not in refused.value.message


def test_a_guessable_key_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert Keyring("hunter2", None).find("hunter2") is not None
    assert "key 1 is short enough to be guessed" in caplog.text
    assert "hunter2" not in caplog.text


def test_keys_of_a_file(tmp_path: Path) -> None:
    path, keys = tmp_path / "keys", [new_key() for _ in range(5)]
    past = datetime.now(UTC) - timedelta(seconds=1)
    limits = CallerLimits(requests_per_min=5)
    write(
        path,
        record("ann", keys[0], models=frozenset({"m"}), limits=limits),
        record("bob", keys[1], priorities=frozenset({"batch"}), admin=True),
        record("old", keys[2], revoked=past),
        record("late", keys[3], expires=past),
    )
    ring = Keyring("", path)
    ann, bob = ring.find(keys[0]), ring.find(keys[1])
    assert ann is not None
    assert (ann.id, ann.models, ann.limits, ann.admin) == ("key:ann", {"m"}, limits, False)
    assert ann.may_use("m")
    assert not ann.may_use("n")
    assert bob is not None
    assert (bob.id, bob.models, bob.priorities, bob.admin) == ("key:bob", None, {"batch"}, True)
    assert [ring.find(key) for key in keys[2:]] == [None, None, None]
    text = path.read_text()
    assert not any(key in text for key in keys)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]  # nothing of the writing is left


def test_a_key_expires_while_it_is_in_use(tmp_path: Path) -> None:
    key = new_key()
    write(tmp_path / "keys", record("ann", key, expires=datetime.now(UTC) + timedelta(seconds=60)))
    ring = Keyring("", tmp_path / "keys")
    assert ring.find(key) is not None
    (entries,) = ring._entries.values()
    msgspec.structs.force_setattr(entries[0], "expires", entries[0].expires - 61)
    assert ring.find(key) is None


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"name": "x"}',
        '{"name": "a b", "sha256": "HASH", "created": "2026-01-01T00:00:00Z"}',
        '{"name": "a\\n", "sha256": "HASH", "created": "2026-01-01T00:00:00Z"}',
        '{"name": "x", "sha256": "short", "created": "2026-01-01T00:00:00Z"}',
        '{"name": "x", "sha256": "HASH", "created": "2026-01-01T00:00:00"}',
        # Misspelt: ignoring it would let the key use every model.
        '{"name": "x", "sha256": "HASH", "created": "2026-01-01T00:00:00Z", "model": ["a"]}',
        '{"name": "x", "sha256": "HASH", "created": "2026-01-01T00:00:00Z", "limits": {"rpm": 1}}',
        '{"name": "x", "sha256": "HASH", "created": "2026-01-01T00:00:00Z", '
        '"limits": {"requests_per_min": -1}}',
        '{"name": "x", "sha256": "HASH", "created": "2026-01-01T00:00:00Z", "priorities": ["vip"]}',
        '{"name": "x", "sha256": "HASH", "created": "2026-01-01T00:00:00Z", "weight": 0}',
        b'{"name": "\xff"}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes) -> None:
    path = tmp_path / "keys"
    good = json.dumps({"name": "ok", "sha256": "0" * 64, "created": "2026-01-01T00:00:00Z"})
    text = line if isinstance(line, bytes) else line.replace("HASH", "1" * 64).encode()
    path.write_bytes(good.encode() + b"\n\n" + text + b"\n")
    path.chmod(0o600)
    with pytest.raises(SettingsError, match=r"keys, line 3: ") as refused:
        Keyring("", path)
    assert "\n" not in refused.value.message


def test_a_file_that_anyone_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path)
    path.chmod(0o602)
    with pytest.raises(SettingsError, match="anyone may write to it; run `chmod 600"):
        read_keys(path)
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        Keyring("", tmp_path / "none")


async def test_the_file_is_read_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "RELOAD_S", 0.05)
    path, first, second = tmp_path / "keys", new_key(), new_key()
    write(path, record("ann", first))
    ring = Keyring(f"env:{STRONG}", path)
    watching = asyncio.create_task(ring.watch())
    try:
        write(path, record("ann", first), record("bob", second))
        await until(lambda: ring.find(second) is not None)
        # Half written, and gone: both change nothing, and are said once each.
        path.write_text('{"name": "ann", "sha')
        await until(lambda: "the keys stay as they were" in caplog.text)
        path.unlink()
        await until(lambda: caplog.text.count("the keys stay as they were") == 2)
        assert ring.find(first) is not None
        write(path, record("ann", first, revoked=datetime.now(UTC)), record("bob", second))
        await until(lambda: ring.find(first) is None)
        assert ring.find(second) is not None
        assert ring.find(STRONG) is not None
    finally:
        await cancel_until_done([watching])


def add_some(path: Path, number: int) -> None:
    for turn in range(5):
        added = record(f"k{number}-{turn}", new_key())
        change_keys(path, lambda records, added=added: [*records, added])


def test_two_that_change_the_file_at_once_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    context = multiprocessing.get_context("fork")
    adders = [context.Process(target=add_some, args=(path, number)) for number in range(4)]
    for adder in adders:
        adder.start()
    for adder in adders:
        adder.join(20)
    assert [adder.exitcode for adder in adders] == [0] * 4
    assert len({item.name for item in read_keys(path)}) == 20


def test_a_change_that_fails_leaves_the_file(tmp_path: Path) -> None:
    path, key = tmp_path / "keys", new_key()
    write(path, record("ann", key))
    before = path.read_bytes()

    def fail(_: list[KeyRecord]) -> list[KeyRecord]:
        raise SettingsError("no")

    with pytest.raises(SettingsError):
        change_keys(path, fail)
    assert path.read_bytes() == before
    (tmp_path / "link").symlink_to(path)
    change_keys(tmp_path / "link", lambda records: [*records, record("bob", new_key())])
    assert [item.name for item in read_keys(path)] == ["ann", "bob"]
    assert (tmp_path / "link").is_symlink()
