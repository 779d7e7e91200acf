"""Options that several commands have, and how they are handed to the settings."""

from pathlib import Path
from typing import Any

import click

host = click.option("--host", help="Address the API listens on.")
engine = click.option(
    "--engine", type=click.Choice(["transformers", "fake"]), help="What runs the model."
)
url = click.option("--url", help="Where the fleet is; by default your `millstream up`.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")

A_FILE = click.Path(dir_okay=False, path_type=Path)


def given(**options: Any) -> dict[str, Any]:
    """Those that were given: they win over the settings' other sources."""
    return {name: value for name, value in options.items() if value is not None}
