"""Keys for tests."""

from datetime import UTC, datetime
from pathlib import Path

from millstream.api.auth.key_file import KeyRecord, change_keys, digest_of, new_key


def make_key(path: Path, name: str, **rights: object) -> str:
    """A key in the file of keys."""
    key, now = new_key(), datetime.now(UTC)
    record = KeyRecord(name=name, sha256=digest_of(key).hex(), created=now, **rights)  # type: ignore[arg-type]
    change_keys(path, lambda records: [*records, record])
    return key
