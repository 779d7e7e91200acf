"""`bench`: load on a fleet, with the options of vLLM's."""

from pathlib import Path

import click

from millstream.fleet.commands import options


@click.command(context_settings={"show_default": True})
@click.argument("model", required=False)
@options.url
@click.option("--num-prompts", type=click.IntRange(1, 1_000_000), default=100, help="Requests.")
@click.option(
    "--max-concurrency",
    type=click.IntRange(1, 100_000),
    help="Most open at once; by default 16, and without bound where there is a rate.",
)
@click.option(
    "--request-rate",
    type=click.FloatRange(0, min_open=True),
    help="Requests per second, independent of answers; by default as many as may be open.",
)
@click.option(
    "--burstiness",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    help="1: a Poisson process; less comes in bursts, more comes evenly.",
)
@click.option(
    "--ramp-up",
    type=(click.Choice(["linear", "exponential"]), float, float),
    metavar="SHAPE FROM TO",
    help="Let the rate grow, as in `--ramp-up linear 1 20`.",
)
@click.option("--input-len", type=click.IntRange(1), default=128, help="Words of a prompt.")
@click.option("--output-len", type=click.IntRange(1), default=128, help="Tokens of an answer.")
@click.option(
    "--range-ratio", type=click.FloatRange(0, 1), default=0.0, help="Spread of both lengths."
)
@click.option(
    "--mix",
    "mixes",
    type=(float, int, int),
    multiple=True,
    metavar="SHARE INPUT OUTPUT",
    help="Instead of both: a kind of request and its share. May be repeated.",
)
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0)
@click.option("--num-warmups", type=click.IntRange(0), default=1, help="Requests not counted.")
@click.option("--seed", type=int, default=0, help="Which prompts, and when.")
@click.option("--json", "json_file", type=options.A_FILE, help="Also write the figures.")
@click.option("--html", "html_file", type=options.A_FILE, help="Also write a page with curves.")
def bench(
    *,
    model: str | None,
    url: str | None,
    num_prompts: int,
    max_concurrency: int | None,
    request_rate: float | None,
    burstiness: float,
    ramp_up: tuple[str, float, float] | None,
    input_len: int,
    output_len: int,
    range_ratio: float,
    mixes: tuple[tuple[float, int, int], ...],
    temperature: float,
    num_warmups: int,
    seed: int,
    json_file: Path | None,
    html_file: Path | None,
) -> int:
    """Put a load on the fleet: TTFT, inter-token latency, tokens/s, errors.

    Options and figures have the names of vLLM's `bench serve`.
    """
    import math

    from millstream.fleet.bench.arrivals import Arrivals
    from millstream.fleet.bench.run import BenchOptions, run
    from millstream.fleet.bench.workload import Length, Mix
    from millstream.shared.settings import read_settings

    if ramp_up is not None and min(ramp_up[1:]) <= 0:
        raise click.BadParameter("rates must be more than 0", param_hint="--ramp-up")
    shape, first, last = ramp_up or ("", 1.0, 1.0)
    kinds = mixes or ((1.0, input_len, output_len),)
    if min(min(kind) for kind in kinds) <= 0:
        raise click.BadParameter("shares and lengths must be more than 0", param_hint="--mix")
    load = BenchOptions(
        model=model,
        count=num_prompts,
        at_once=max_concurrency or (num_prompts if request_rate or ramp_up else 16),
        arrivals=Arrivals(
            rate=request_rate or math.inf,
            burstiness=burstiness,
            ramp=shape,
            ramp_start=first,
            ramp_end=last,
        ),
        mixes=[
            Mix(share, Length(prompt, range_ratio), Length(answer, range_ratio))
            for share, prompt, answer in kinds
        ],
        temperature=temperature,
        warmups=num_warmups,
        seed=seed,
        json_file=json_file,
        html_file=html_file,
    )
    return run(read_settings(options.given(url=url)), load)
