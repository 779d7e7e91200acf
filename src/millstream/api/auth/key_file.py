"""The file of keys: a JSON object a line, with a key's hash and rights, never the key itself."""

import fcntl
import hashlib
import os
import secrets
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec

from millstream.api.auth.caller import Rights
from millstream.shared.errors import SettingsError

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""What a key may be called: the name is the owner of its tasks."""

_Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class KeyRecord(Rights, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line."""

    name: Annotated[str, msgspec.Meta(pattern=rf"^{NAME}\Z")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    created: _Moment
    expires: _Moment | None = None
    revoked: _Moment | None = None

    @property
    def id(self) -> str:
        """What a key is called in lists and logs; nothing of the key can be told from it."""
        return self.sha256[:8]

    @property
    def live(self) -> bool:
        """Whether the key is taken now."""
        now = datetime.now(UTC)
        return self.revoked is None and (self.expires is None or now < self.expires)


_decode = msgspec.json.Decoder(KeyRecord).decode
_encode = msgspec.json.Encoder(order="sorted").encode


def new_key() -> str:
    """A key that nobody guesses: 256 random bits."""
    return f"ms-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> bytes:
    """What is kept of a key; a plain hash does for what cannot be guessed."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path) -> list[KeyRecord]:
    """The records of a file, in order.

    Raises:
        SettingsError: it cannot be read, or a line is not as it must be.
    """
    try:
        if path.stat().st_mode & 0o002:
            raise SettingsError(f"{path}: anyone may write to it; run `chmod 600 {path}`")
        lines = path.read_bytes().splitlines()
    except FileNotFoundError as error:
        todo = "`millstream keys add NAME` makes it"
        raise SettingsError(f"{path}: cannot be read: {error.strerror}; {todo}") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    records: list[KeyRecord] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                records.append(_decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise SettingsError(f"{path}, line {number}: {error}") from None
    return records


def change_keys(
    path: Path, change: Callable[[list[KeyRecord]], Sequence[KeyRecord]]
) -> Sequence[KeyRecord]:
    """Put a changed list in the file's place, whole or not at all; the list.

    Two that change it at once take turns. The file is its owner's alone.

    Raises:
        SettingsError: it cannot be read or written.
    """
    try:
        with _turn(path.parent):
            records = change(read_keys(path) if path.exists() else [])
            _replace(path, b"".join(_encode(record) + b"\n" for record in records))
            return records
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror}") from None


@contextmanager
def _turn(folder: Path) -> Generator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, text: bytes) -> None:
    target = path.resolve()  # a link stays one
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            if target.exists():  # root must not take it away from the pods' user
                owner = target.stat()
                if (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(descriptor, owner.st_uid, owner.st_gid)
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
