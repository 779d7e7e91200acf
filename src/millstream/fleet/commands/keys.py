"""`keys`: who may use the fleet."""

from typing import Any

import click

from millstream.fleet.commands import options

_key_file = click.option("--file", help="Instead of MILLSTREAM_API_KEYS_FILE.")


@click.group()
def keys() -> None:
    """Make, list and revoke the keys of MILLSTREAM_API_KEYS_FILE."""


@keys.command("add")
@click.argument("name")
@click.option("--model", "models", multiple=True, metavar="NAME", help="May use only this one.")
@click.option("--admin", is_flag=True, help="May see and direct the fleet: /fleet, top, bench.")
@click.option(
    "--priority",
    "priorities",
    multiple=True,
    type=click.Choice(["interactive", "batch"]),
    help="May use only this class.",
)
@click.option("--limit", "limits", multiple=True, metavar="NAME=N", help="May be repeated.")
@click.option(
    "--weight",
    type=click.FloatRange(0.01, 100),
    default=1.0,
    help="Its share while others wait too, against theirs, which is 1.",
)
@click.option("--days", type=click.IntRange(1, 36_500), help="How long it is taken.")
@_key_file
def keys_add(*, name: str, limits: tuple[str, ...], file: str | None, **rights: Any) -> int:
    """Make a key for the caller NAME, and print it this once."""
    from millstream.fleet.keys import NewKey, add_key, parse_limits
    from millstream.shared.settings import read_settings

    asked = NewKey(name=name, limits=parse_limits(limits), **rights)
    return add_key(read_settings(), asked, file=file)


@keys.command("list")
@_key_file
@options.as_json
def keys_list(*, file: str | None, as_json: bool) -> int:
    """Show all keys; not what would let anyone in."""
    from millstream.fleet.keys import list_keys
    from millstream.shared.settings import read_settings

    return list_keys(read_settings(), file=file, as_json=as_json)


@keys.command("revoke")
@click.argument("which", metavar="ID|NAME")
@_key_file
def keys_revoke(*, which: str, file: str | None) -> int:
    """Take back one key, or all of a caller."""
    from millstream.fleet.keys import revoke_key
    from millstream.shared.settings import read_settings

    return revoke_key(read_settings(), which, file=file)
