"""`dead`: tasks that were given up."""

from collections.abc import Callable

import click

from millstream.fleet.commands import options


def _chosen_letters(command: Callable[..., int]) -> Callable[..., int]:
    """Ids, or all of a model, or all."""
    for option in (
        click.option("--model", metavar="NAME", help="Only letters of this model."),
        click.option("--all", "everything", is_flag=True, help="All there are."),
        click.argument("task_ids", metavar="[ID]...", nargs=-1),
    ):
        command = option(command)
    return command


@click.group()
def dead() -> None:
    """Look after tasks that were given up after MAX_ATTEMPTS losses."""


@dead.command("list")
@click.argument("model", required=False)
@options.as_json
def dead_list(*, model: str | None, as_json: bool) -> int:
    """Show the dead letters, of one MODEL or of all."""
    from millstream.fleet.dead import list_letters
    from millstream.shared.settings import read_settings

    return list_letters(read_settings(), model, as_json=as_json)


@dead.command("show")
@click.argument("task_id", metavar="ID")
@options.as_json
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


def _choose_one_way(task_ids: tuple[str, ...], everything: bool) -> None:
    if bool(task_ids) == everything:
        raise click.UsageError("Give ids, or --all.")
