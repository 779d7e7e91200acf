"""One fleet per folder, one server per log, a socket path of bearable length."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.fleet.state_folder import StateFolder, default_state_folder
from millstream.shared.errors import MillstreamError


def test_the_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a")
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    assert default_state_folder() == Path("/var/state/millstream")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", ignored)
        assert default_state_folder() == Path("/home/a/.local/state/millstream")


def test_the_folder_is_taken_once_and_free_again(tmp_path: Path) -> None:
    first, second = StateFolder(tmp_path / "s"), StateFolder(tmp_path / "s")
    first.claim()
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    with pytest.raises(MillstreamError, match=f"process {os.getpid()}"):
        second.claim()
    second.close()
    first.close()
    second.claim()
    second.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MillstreamError, match=r"cannot keep state in .*XDG_STATE_HOME"):
        StateFolder(tmp_path / "file" / "s").claim()


async def test_a_lock_is_free_when_its_last_holder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.fleet.state_folder._LEAVE_S", 0.1)
    monkeypatch.setattr("millstream.fleet.state_folder._FLUSH_S", 0.1)
    state = StateFolder(tmp_path)
    lock = await state.lock_database()
    inherited = os.dup(lock)
    os.close(lock)
    with pytest.raises(MillstreamError, match="still uses"):
        await state.lock_database()
    os.close(inherited)
    os.close(await state.lock_database())


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """One whose path is short wherever pytest has its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_a_socket_path_is_short_enough(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert StateFolder(Path("/s")).socket == Path("/s/valkey.sock")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(short_folder))
    deep = [StateFolder(Path("/", *[letter * 40] * 3)) for letter in "ab"]
    assert deep[0].socket.parent == short_folder / f"millstream-{os.getuid()}"
    assert deep[0].socket == deep[0].socket
    assert deep[0].socket != deep[1].socket
    deep[0].socket.parent.chmod(0o755)
    with pytest.raises(MillstreamError, match="not a folder of yours alone"):
        _ = deep[0].socket
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/" + "t" * 90)
    assert deep[0].socket.parent == Path(f"/tmp/millstream-{os.getuid()}")
