"""The folder that outlives a fleet, and the two locks that keep fleets apart in it.

Both are flocks, so the kernel frees them whatever their holder dies of. `up.lock` is held by
`millstream up` alone: one fleet at a time. `valkey.lock` is inherited by the guard and its Valkey,
so it is free exactly when neither lives: two servers never write to one log, and since the guard
outlives the rest of its fleet, that fleet's ports are free by then.
"""

import asyncio
import fcntl
import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from millstream.fleet import lifeline
from millstream.shared.errors import MillstreamError

# The guard of a fleet whose parent was killed takes its grace, and the database its own time.
_LEAVE_S = 8.0
# A Valkey whose guard was killed was told to end by the kernel.
_FLUSH_S = 2.0
_POLL_S = 0.05
# sockaddr_un has room for 104 bytes on macOS and 108 on Linux, with a zero at the end.
_LONGEST_SOCKET_PATH = 103


def default_state_folder() -> Path:
    """`millstream` in $XDG_STATE_HOME, which must be absolute to count."""
    home = os.environ.get("XDG_STATE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path.home() / ".local" / "state"
    return base / "millstream"


def running_redis_url() -> str | None:
    """The database of this user's `millstream up`; None where there is none."""
    state = StateFolder(default_state_folder())
    return state.redis_url if state.socket.exists() else None


def running_url() -> str | None:
    """Where this user's `millstream up` is asked, once it can be; None where there is none."""
    state = StateFolder(default_state_folder())
    try:
        return state.announced.read_text("utf-8").strip() if state.socket.exists() else None
    except OSError:
        return None


class StateFolder:
    """The state of one embedded fleet; `claim` it before anything is started."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._up_lock: int | None = None

    @property
    def mark(self) -> str:
        """By which the processes of this folder's fleet are known."""
        return str(self.path)

    @property
    def data(self) -> Path:
        """Where the database keeps its log."""
        return self.path / "valkey"

    @property
    def socket(self) -> Path:
        """Where the database listens.

        Beside its data, since folders for sockets and temporary files are cleaned now and then;
        only a path too long for a socket takes it to one of those.
        """
        path = self.path / "valkey.sock"
        if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH:
            return path
        name = hashlib.blake2b(os.fsencode(self.path), digest_size=8).hexdigest() + ".sock"
        return _private_temporary_folder(len(name) + 1) / name

    @property
    def announced(self) -> Path:
        """A file with the URL of the first pod."""
        return self.path / "url"

    @property
    def redis_url(self) -> str:
        """Where the database is reached while a fleet runs here."""
        return "unix://" + quote(str(self.socket))

    def claim(self) -> None:
        """Take the folder for one `millstream up`.

        Raises:
            MillstreamError: another one has it, or it cannot be written.
        """
        try:
            self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            self._up_lock = os.open(self.path / "up.lock", os.O_RDWR | os.O_CREAT, 0o600)
            if not _try_lock(self._up_lock):
                holder = os.pread(self._up_lock, 32, 0).decode("ascii", "replace").strip()
                raise MillstreamError(
                    f"another `millstream up` (process {holder or 'unknown'}) keeps its state in "
                    f"{self.path}; stop it, or set XDG_STATE_HOME or MILLSTREAM_REDIS_URL"
                )
            self.announced.unlink(missing_ok=True)  # of one that was killed
            os.ftruncate(self._up_lock, 0)
            os.pwrite(self._up_lock, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            raise MillstreamError(
                f"cannot keep state in {self.path}: {error.strerror}; set XDG_STATE_HOME to a "
                "folder on a local disk that you may write"
            ) from None

    def announce(self, url: str) -> None:
        """Tell this user's other commands where the fleet is asked."""
        self.announced.write_text(f"{url}\n", "utf-8")

    async def lock_database(self) -> int:
        """Wait until no server uses the data; the lock, for the next one to inherit.

        Raises:
            MillstreamError: one cannot be ended.
        """
        lock = os.open(self.path / "valkey.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            limit_s = _LEAVE_S if lifeline.guarded(self.mark) else _FLUSH_S
            if await _lock_within(lock, limit_s):
                return lock
            # Its guard is gone or stuck. A killed Valkey loses nothing that the kernel has.
            await self.end_leftovers()
            if await _lock_within(lock, _FLUSH_S):
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        raise MillstreamError(
            f"a Valkey of an earlier fleet still uses {self.data}; end it "
            f"(`fuser {self.path / 'valkey.lock'}` names it)"
        )

    async def end_leftovers(self) -> None:
        """End what is left of a fleet whose guard was killed as well: nobody else may use this."""
        await asyncio.to_thread(lifeline.kill_marked, self.mark, {os.getpid()})

    def close(self) -> None:
        """Leave the folder to the next one; what still runs keeps its own hold on it."""
        if self._up_lock is not None:
            self.announced.unlink(missing_ok=True)
            os.close(self._up_lock)
            self._up_lock = None


async def _lock_within(lock: int, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not _try_lock(lock):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _private_temporary_folder(room: int) -> Path:
    """One of this user's alone, whose path leaves a socket's room for so many bytes more."""
    name = f"millstream-{os.getuid()}"
    folder = Path(tempfile.gettempdir()) / name
    if len(os.fsencode(folder)) + room > _LONGEST_SOCKET_PATH:
        folder = Path("/tmp") / name  # noqa: S108 - whose it is, is looked at below
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    # Anyone may have made it first, in a folder that all can write.
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.getuid()
        or stat.S_IMODE(found.st_mode) & 0o077
    ):
        raise MillstreamError(f"{folder} is not a folder of yours alone; remove it, or set TMPDIR")
    return folder
