"""`chaos`: faults for a fleet of its own."""

from pathlib import Path

import click

from millstream.shared.errors import MillstreamError


@click.command(context_settings={"show_default": True})
@click.option("--seconds", type=click.IntRange(5, 86_400), default=90, help="How long to strike.")
@click.option("--seed", type=click.IntRange(0), help="Which faults, when; by default any.")
@click.option("--apis", type=click.IntRange(2, 16), default=3, help="API pods.")
@click.option("--workers", type=click.IntRange(3, 32), default=6, help="Workers.")
@click.option("--shards", type=click.IntRange(1, 16), default=1, help="Shards, of one server.")
@click.option("--clients", type=click.IntRange(1, 1000), default=40, help="Clients at once.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Also write a report.")
def chaos(
    *,
    seconds: int,
    seed: int | None,
    apis: int,
    workers: int,
    shards: int,
    clients: int,
    json_file: str | None,
) -> int:
    """Torment a fleet of its own, and check that nothing is lost."""
    import secrets

    if json_file and not Path(json_file).absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder for {json_file}", param_hint="--json")
    try:
        from millstream.fleet.chaos.run import ChaosOptions, run
    except ModuleNotFoundError as error:
        if (error.name or "millstream").startswith("millstream"):
            raise
        raise MillstreamError(
            f"{error.name} is not installed: run `pip install '.[all,chaos]'`"
        ) from None

    return run(
        ChaosOptions(
            seconds=seconds,
            seed=secrets.randbelow(1_000_000) if seed is None else seed,
            apis=apis,
            workers=workers,
            shards=shards,
            clients=clients,
            json_file=Path(json_file) if json_file else None,
        )
    )
