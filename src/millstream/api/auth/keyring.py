"""The keys that are taken: those of the settings, and those of a file that may change meanwhile."""

import asyncio
import hmac
import logging
import os
import re
import time
from pathlib import Path

import msgspec

from millstream.api.auth.caller import Caller, Rights
from millstream.api.auth.key_file import NAME, digest_of, read_keys
from millstream.shared.errors import SettingsError

logger = logging.getLogger(__name__)

RELOAD_S = 1.0
LONGEST_KEY = 512
GUESSABLE = 16  # characters
ADMIN = "admin"
"""A key of the settings with this name is an administrator's."""


class _Entry(msgspec.Struct, frozen=True):
    digest: bytes
    caller: Caller
    expires: float


class Keyring:
    """Finds the caller of a key.

    Args:
        keys: `SECRET` or `NAME:SECRET`, comma-separated.
        file: Where `millstream keys` keeps more; None: nowhere.

    Raises:
        SettingsError: one of them is not as it must be.
    """

    def __init__(self, keys: str, file: Path | None) -> None:
        self._file = file
        self._fixed = _entries_of(keys)
        self._state = _state_of(file) if file else None
        self._entries = self._load()

    def find(self, key: str) -> Caller | None:
        """The caller whose key this is; takes as long for any key that is none."""
        if len(key) > LONGEST_KEY:
            return None
        digest = digest_of(key)
        for entry in self._entries.get(digest[:4], ()):
            if hmac.compare_digest(entry.digest, digest) and time.time() < entry.expires:
                return entry.caller
        return None

    @property
    def live(self) -> int:
        """How many keys are taken now."""
        now = time.time()
        return sum(now < entry.expires for entries in self._entries.values() for entry in entries)

    async def watch(self) -> None:
        """Read the file again whenever it has changed; one that is broken changes nothing."""
        while self._file is not None:
            await asyncio.sleep(RELOAD_S)
            state = await asyncio.to_thread(_state_of, self._file)
            if state == self._state:
                continue
            self._state = state
            try:
                self._entries = await asyncio.to_thread(self._load)
            except SettingsError as error:
                logger.error("the keys stay as they were: %s", error)
            else:
                logger.info("read the keys of %s again", self._file)

    def _load(self) -> dict[bytes, list[_Entry]]:
        entries = list(self._fixed)
        for record in read_keys(self._file) if self._file else ():
            if record.revoked is None:
                expires = record.expires.timestamp() if record.expires else float("inf")
                caller = Caller.of(f"key:{record.name}", record)
                entries.append(_Entry(bytes.fromhex(record.sha256), caller, expires))
        # By the first bytes of the hash, which tell nothing of the key; the rest in constant time.
        table: dict[bytes, list[_Entry]] = {}
        for entry in entries:
            table.setdefault(entry.digest[:4], []).append(entry)
        return table


def _state_of(file: Path) -> tuple[int, ...]:
    """What differs when a file has been changed or replaced; nothing where there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _entries_of(keys: str) -> list[_Entry]:
    entries: list[_Entry] = []
    for number, part in enumerate(keys.split(","), 1):
        name, colon, secret = part.strip().partition(":")
        if not colon:
            name, secret = "", name
        if not secret and not colon:
            continue
        which = f"MILLSTREAM_API_KEYS: key {number}"
        if not secret or not secret.isascii() or not secret.isprintable() or " " in secret:
            raise SettingsError(f"{which} must be SECRET or NAME:SECRET, in ASCII, without blanks")
        if len(secret) > LONGEST_KEY:
            raise SettingsError(f"{which} is longer than {LONGEST_KEY} characters")
        if colon and not re.fullmatch(NAME, name):
            raise SettingsError(f"{which} needs another name: letters, digits, '.', '_' and '-'")
        if len(secret) < GUESSABLE:
            logger.warning("%s is short enough to be guessed; `millstream keys` makes one", which)
        digest = digest_of(secret)
        # Not by its place in the list: another order must not give one's tasks to another.
        owner = name or digest.hex()[:12]
        caller = Caller.of(f"key:{owner}", Rights(admin=name == ADMIN))
        entries.append(_Entry(digest, caller, float("inf")))
    return entries
