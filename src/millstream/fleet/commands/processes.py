"""`up`, `api` and `worker`: what a fleet is made of."""

import click

from millstream.fleet.commands import options


@click.command()
@click.option("--apis", type=click.IntRange(1, 64), default=1, help="API pods.")
@click.option("--workers", type=click.IntRange(1, 64), default=1, help="Workers per model.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port of the first pod; 0: any.")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME=SOURCE",
    help="A model to serve: a folder, a hub id, a .gguf file, or `bundled`. May be repeated.",
)
@options.engine
@options.host
@click.option("--verbose", "-v", is_flag=True, help="Show all that the processes log.")
def up(
    *,
    apis: int,
    workers: int,
    port: int | None,
    models: tuple[str, ...],
    engine: str | None,
    host: str | None,
    verbose: bool,
) -> int:
    """Run a whole fleet on this machine."""
    from millstream.fleet.up import UpOptions, run
    from millstream.shared.settings import read_settings

    settings = read_settings(options.given(port=port, engine=engine, host=host))
    return run(settings, UpOptions(apis=apis, workers=workers, models=models, verbose=verbose))


@click.command()
@options.host
@click.option("--port", type=click.IntRange(0, 65535), help="Port the API listens on.")
@click.option("--model", metavar="NAME", help="Take tasks for this model before workers join.")
def api(*, host: str | None, port: int | None, model: str | None) -> int:
    """Run one API pod."""
    from millstream.shared.imports import uncollected

    with uncollected():
        from millstream.api.server import serve
    from millstream.shared.settings import read_settings

    return serve(read_settings(options.given(host=host, port=port, model=model)))


@click.command()
@click.option("--model", metavar="NAME=SOURCE", help="The model to serve, or its source alone.")
@options.engine
def worker(*, model: str | None, engine: str | None) -> int:
    """Run one worker."""
    from millstream.fleet.plan import parse_model
    from millstream.shared.settings import read_settings
    from millstream.worker.main import run

    settings = read_settings(options.given(engine=engine))
    if model is not None:
        chosen = parse_model(model, engine=settings.engine)
        settings = read_settings(
            options.given(engine=engine, model=chosen.name, model_source=chosen.source)
        )
    return run(settings)
