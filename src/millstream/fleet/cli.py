"""The `millstream` command: options in, exit code out; all else is imported when it is needed."""

import sys

import click

from millstream import __version__
from millstream.fleet.commands.bench import bench
from millstream.fleet.commands.chaos import chaos
from millstream.fleet.commands.dead import dead
from millstream.fleet.commands.doctor import doctor
from millstream.fleet.commands.keys import keys
from millstream.fleet.commands.processes import api, up, worker
from millstream.fleet.commands.visits import chat, top
from millstream.shared.errors import MillstreamError, SettingsError

OK, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


def main() -> None:
    """Run the command; every expected failure is one line on stderr that says what to do."""
    sys.exit(invoke(sys.argv[1:]))


def invoke(arguments: list[str]) -> int:
    """Run the command with these arguments; the exit code."""
    try:
        return int(cli.main(arguments, prog_name="millstream", standalone_mode=False) or OK)
    except click.UsageError as error:
        return _correct(error)
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


def _correct(error: click.UsageError) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):  # its message is the help
        click.echo(error.format_message(), err=True)
        return WRONG_USAGE
    path = error.ctx.command_path if error.ctx else "millstream"
    return _complain(f"{error.format_message()} See `{path} --help`.", WRONG_USAGE)


def _complain(message: str, code: int) -> int:
    click.echo(f"millstream: {message}", err=True)
    return code


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Serve language models by a fleet that loses nothing.

    Settings come from MILLSTREAM_… variables and .env; options win over both.
    """


for command in (up, api, worker, chat, top, bench, chaos, doctor, dead, keys):
    cli.add_command(command)
