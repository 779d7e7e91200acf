"""The `millstream` command: options in, exit code out; all else is imported when it is needed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from millstream import __version__
from millstream.shared.errors import MillstreamError, SettingsError

OK, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130

_ENGINES = click.Choice(["transformers", "fake"])

_host = click.option("--host", help="Address the API listens on.")
_engine = click.option("--engine", type=_ENGINES, help="What runs the model.")
_url = click.option("--url", help="Where the fleet is; by default on this machine.")
_file = click.Path(dir_okay=False, path_type=Path)
_key_file = click.option("--file", help="Instead of MILLSTREAM_API_KEYS_FILE.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def _chosen_letters(command: Callable[..., int]) -> Callable[..., int]:
    """Ids, or all of a model, or all."""
    for option in (
        click.option("--model", metavar="NAME", help="Only letters of this model."),
        click.option("--all", "everything", is_flag=True, help="All there are."),
        click.argument("task_ids", metavar="[ID]...", nargs=-1),
    ):
        command = option(command)
    return command


def main() -> None:
    """Run the command; every expected failure is one line on stderr that says what to do."""
    sys.exit(invoke(sys.argv[1:]))


def invoke(arguments: list[str]) -> int:
    """Run the command with these arguments; the exit code."""
    try:
        return int(cli.main(arguments, prog_name="millstream", standalone_mode=False) or OK)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "millstream"
        return _complain(f"{error.format_message()} See `{path} --help`.", WRONG_USAGE)
    except SettingsError as error:
        return _complain(error.message, WRONG_USAGE)
    except MillstreamError as error:
        return _complain(error.message, FAILED)
    except ModuleNotFoundError as error:
        if (error.name or "millstream").startswith("millstream"):
            raise
        return _complain(
            f"{error.name} is not installed: run `pip install 'millstream[all]'`, or of [api], "
            "[worker] and [fleet] those this machine needs",
            FAILED,
        )
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED


def _complain(message: str, code: int) -> int:
    click.echo(f"millstream: {message}", err=True)
    return code


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Serve language models by a fleet that loses nothing.

    Settings come from MILLSTREAM_… variables and .env; options win over both.
    """


@cli.command()
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
@_engine
@_host
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

    settings = read_settings(_given(port=port, engine=engine, host=host))
    return run(settings, UpOptions(apis=apis, workers=workers, models=models, verbose=verbose))


@cli.command()
@_host
@click.option("--port", type=click.IntRange(0, 65535), help="Port the API listens on.")
@click.option("--model", metavar="NAME", help="Take tasks for this model before workers join.")
def api(*, host: str | None, port: int | None, model: str | None) -> int:
    """Run one API pod."""
    from millstream.api.server import serve
    from millstream.shared.settings import read_settings

    return serve(read_settings(_given(host=host, port=port, model=model)))


@cli.command()
@click.option("--model", metavar="NAME=SOURCE", help="The model to serve, or its source alone.")
@_engine
def worker(*, model: str | None, engine: str | None) -> int:
    """Run one worker."""
    from millstream.fleet.plan import parse_model
    from millstream.shared.settings import read_settings
    from millstream.worker.main import run

    settings = read_settings(_given(engine=engine))
    if model is not None:
        chosen = parse_model(model, engine=settings.engine)
        settings = read_settings(
            _given(engine=engine, model=chosen.name, model_source=chosen.source)
        )
    return run(settings)


@cli.command()
@click.argument("model", required=False)
@_url
@click.option("--system", metavar="TEXT", default="", help="What the model is told first.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0: always the likeliest token.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer.")
@click.option("--seed", type=int, help="The same answer again, for the same question.")
def chat(
    *,
    model: str | None,
    url: str | None,
    system: str,
    temperature: float | None,
    max_tokens: int | None,
    seed: int | None,
) -> int:
    """Talk to the fleet: in a terminal, or `echo hi | millstream chat`.

    Answers go on when a pod, a worker or the network does not; Ctrl-C stops one.
    """
    from millstream.fleet.chat import Conversation, run
    from millstream.shared.settings import read_settings

    sampling = _given(temperature=temperature, max_tokens=max_tokens, seed=seed)
    return run(read_settings(_given(url=url)), Conversation(model, system, sampling))


@cli.command()
@_url
@click.option("--once", is_flag=True, help="Print it once, as on a pipe.")
@_json
def top(*, url: str | None, once: bool, as_json: bool) -> int:
    """Show the fleet live: workers, models, queues, tokens/s."""
    from millstream.fleet.top import run
    from millstream.shared.settings import read_settings

    return run(read_settings(_given(url=url)), once=once, as_json=as_json)


@cli.command(context_settings={"show_default": True})
@click.argument("model", required=False)
@_url
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
@click.option("--json", "json_file", type=_file, help="Also write the figures.")
@click.option("--html", "html_file", type=_file, help="Also write a page with curves.")
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
    options = BenchOptions(
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
    return run(read_settings(_given(url=url)), options)


@cli.command(context_settings={"show_default": True})
@click.option("--seconds", type=click.IntRange(5, 86_400), default=90, help="How long to strike.")
@click.option("--seed", type=click.IntRange(0), help="Which faults, when; by default any.")
@click.option("--apis", type=click.IntRange(2, 16), default=3, help="API pods.")
@click.option("--workers", type=click.IntRange(3, 32), default=6, help="Workers.")
@click.option("--clients", type=click.IntRange(1, 1000), default=40, help="Clients at once.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Also write a report.")
def chaos(
    *, seconds: int, seed: int | None, apis: int, workers: int, clients: int, json_file: str | None
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
            f"{error.name} is not installed: run `pip install 'millstream[all,chaos]'`"
        ) from None

    return run(
        ChaosOptions(
            seconds=seconds,
            seed=secrets.randbelow(1_000_000) if seed is None else seed,
            apis=apis,
            workers=workers,
            clients=clients,
            json_file=Path(json_file) if json_file else None,
        )
    )


@cli.command()
@click.option(
    "--model", "models", multiple=True, metavar="NAME=SOURCE", help="As for `up`. May be repeated."
)
@_engine
@_host
@click.option("--port", type=click.IntRange(0, 65535), help="Port the API is to listen on.")
@_json
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

    settings = read_settings(_given(engine=engine, host=host, port=port))
    return run(settings, models, as_json=as_json)


@cli.group()
def dead() -> None:
    """Look after tasks that were given up after MAX_ATTEMPTS losses."""


@dead.command("list")
@click.argument("model", required=False)
@_json
def dead_list(*, model: str | None, as_json: bool) -> int:
    """Show the dead letters, of one MODEL or of all."""
    from millstream.fleet.dead import list_letters
    from millstream.shared.settings import read_settings

    return list_letters(read_settings(), model, as_json=as_json)


@dead.command("show")
@click.argument("task_id", metavar="ID")
@_json
def dead_show(*, task_id: str, as_json: bool) -> int:
    """Show one: its request, its error, and the text it had."""
    from millstream.fleet.dead import show_letter
    from millstream.shared.settings import read_settings

    return show_letter(read_settings(), task_id, as_json=as_json)


@dead.command("retry")
@_chosen_letters
def dead_retry(*, task_ids: tuple[str, ...], everything: bool, model: str | None) -> int:
    """Submit some again, each as a new task."""
    from millstream.fleet.dead import retry_letters
    from millstream.shared.settings import read_settings

    _choose_one_way(task_ids, everything)
    return retry_letters(read_settings(), task_ids, model)


@dead.command("drop")
@_chosen_letters
def dead_drop(*, task_ids: tuple[str, ...], everything: bool, model: str | None) -> int:
    """Forget some."""
    from millstream.fleet.dead import drop_letters
    from millstream.shared.settings import read_settings

    _choose_one_way(task_ids, everything)
    return drop_letters(read_settings(), task_ids, model)


@cli.group()
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
@_json
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


def _choose_one_way(task_ids: tuple[str, ...], everything: bool) -> None:
    if bool(task_ids) == everything:
        raise click.UsageError("Give ids, or --all.")


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
