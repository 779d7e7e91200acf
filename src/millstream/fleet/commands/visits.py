"""`chat` and `top`: for people who visit a fleet."""

import click

from millstream.fleet.commands import options


@click.command()
@click.argument("model", required=False)
@options.url
@click.option("--system", metavar="TEXT", default="", help="What the model is told first.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    help="0: always the likeliest token; by default what the model's makers suggest.",
)
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

    sampling = options.given(temperature=temperature, max_tokens=max_tokens, seed=seed)
    return run(read_settings(options.given(url=url)), Conversation(model, system, sampling))


@click.command()
@options.url
@click.option("--once", is_flag=True, help="Print it once, as on a pipe.")
@options.as_json
def top(*, url: str | None, once: bool, as_json: bool) -> int:
    """Show the fleet live: workers, models, queues, tokens/s."""
    from millstream.fleet.top import run
    from millstream.shared.settings import read_settings

    return run(read_settings(options.given(url=url)), once=once, as_json=as_json)
