"""`doctor`: what is wrong with a fleet's surroundings."""

import click

from millstream.fleet.commands import options


@click.command()
@click.option(
    "--model", "models", multiple=True, metavar="NAME=SOURCE", help="As for `up`. May be repeated."
)
@options.engine
@options.host
@click.option("--port", type=click.IntRange(0, 65535), help="Port the API is to listen on.")
@options.as_json
def doctor(
    *,
    models: tuple[str, ...],
    engine: str | None,
    host: str | None,
    port: int | None,
    as_json: bool,
) -> int:
    """Check Redis, models and ports, and say what to mend."""
    from millstream.fleet.doctor import run
    from millstream.shared.settings import read_settings

    settings = read_settings(options.given(engine=engine, host=host, port=port))
    return run(settings, models, as_json=as_json)
