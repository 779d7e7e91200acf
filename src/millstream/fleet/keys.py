"""`millstream keys`: makes keys, lists them, and takes them back; the file holds hashes alone."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import msgspec

from millstream.api.auth.caller import CallerLimits, Priority
from millstream.api.auth.key_file import KeyRecord, change_keys, digest_of, new_key, read_keys
from millstream.shared.errors import MillstreamError, SettingsError
from millstream.shared.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """What the command line says of a key to be made."""

    name: str
    models: Sequence[str] = ()
    admin: bool = False
    priorities: Sequence[Priority] = ()
    limits: CallerLimits = field(default_factory=CallerLimits)
    weight: float = 1.0
    days: int | None = None


def parse_limits(texts: Sequence[str]) -> CallerLimits:
    """Read `NAME=N`, some of them.

    Raises:
        SettingsError: a name is none, or a number is none.
    """
    given = {name: number for name, _, number in (text.partition("=") for text in texts)}
    try:
        return msgspec.convert(given, CallerLimits, strict=False)
    except msgspec.ValidationError:
        names = ", ".join(CallerLimits.__struct_fields__)
        raise SettingsError(f"--limit: give NAME=N with a whole number; of {names}") from None


def add_key(settings: Settings, asked: NewKey, *, file: str | None) -> int:
    """Make a key and print it, this once.

    Raises:
        SettingsError: the name cannot be, or there is no file.
    """
    path = _file(settings, file)
    key = new_key()
    now = datetime.now(UTC).replace(microsecond=0)
    raw: dict[str, Any] = {
        "name": asked.name,
        "sha256": digest_of(key).hex(),
        "created": now,
        "expires": now + timedelta(days=asked.days) if asked.days else None,
        "models": asked.models or None,
        "admin": asked.admin,
        "priorities": asked.priorities or None,
        "limits": asked.limits,
        "weight": asked.weight,
    }
    try:
        record = msgspec.convert(raw, KeyRecord, from_attributes=True)
    except msgspec.ValidationError:
        raise SettingsError(
            f"{asked.name!r} cannot be a key's name: up to 64 letters, digits, '.', '_' and '-'"
        ) from None
    records = change_keys(path, lambda records: [*records, record])
    before = [item.id for item in records[:-1] if item.name == record.name and item.live]
    if before:
        click.echo(
            f"{record.name} has the key {', '.join(before)} too: the same caller; revoke it once "
            "the new one is in use",
            err=True,
        )
    click.echo(f"key {record.id} of {record.name}, shown this once:", err=True)
    click.echo(key)
    return 0


def list_keys(settings: Settings, *, file: str | None, as_json: bool) -> int:
    """Print all keys, without what would let anyone in."""
    records = read_keys(_file(settings, file))
    if as_json:
        rows = [{"id": record.id, **msgspec.to_builtins(record)} for record in records]
        for row in rows:
            del row["sha256"]
        click.echo(json.dumps(rows, ensure_ascii=False))
        return 0
    for record in records:
        click.echo(
            f"{record.id}  {record.name:<24} {_state(record):<22} {_rights(record)}".rstrip()
        )
    return 0


def revoke_key(settings: Settings, which: str, *, file: str | None) -> int:
    """Take back a key by its id, or all keys of a name.

    Raises:
        UnknownKey: there is none that is still taken.
    """
    now = datetime.now(UTC).replace(microsecond=0)
    revoked: list[str] = []

    def change(records: list[KeyRecord]) -> list[KeyRecord]:
        changed: list[KeyRecord] = []
        for record in records:
            if which in (record.id, record.name) and record.revoked is None:
                revoked.append(record.id)
                record = msgspec.structs.replace(record, revoked=now)  # noqa: PLW2901
            changed.append(record)
        if not revoked:
            raise UnknownKey(f"no key {which!r} is there to be revoked; see `millstream keys list`")
        return changed

    change_keys(_file(settings, file), change)
    click.echo(f"revoked {', '.join(revoked)}; pods notice within a second or two", err=True)
    return 0


class UnknownKey(MillstreamError):
    """No key has this id or name, or it was revoked before."""


def _file(settings: Settings, file: str | None) -> Path:
    path = file or settings.api_keys_file
    if not path:
        raise SettingsError("set MILLSTREAM_API_KEYS_FILE, or give --file: where are the keys?")
    return Path(path)


def _state(record: KeyRecord) -> str:
    if record.revoked is not None:
        return f"revoked {record.revoked:%Y-%m-%d}"
    if record.expires is not None:
        return f"{'until' if record.live else 'expired'} {record.expires:%Y-%m-%d}"
    return "valid"


def _rights(record: KeyRecord) -> str:
    parts = ["admin"] if record.admin else []
    if record.models is not None:
        parts.append("models: " + ", ".join(sorted(record.models)))
    if record.priorities is not None:
        parts.append("priorities: " + ", ".join(sorted(record.priorities)))
    if record.weight != 1:
        parts.append(f"weight: {record.weight:g}")
    limits: dict[str, Any] = msgspec.to_builtins(record.limits)
    parts += [f"{name}: {value}" for name, value in limits.items()]
    return "; ".join(parts)
