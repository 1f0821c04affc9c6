"""Common parts of all commands: exit codes for errors, and help with defaults and exit codes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import click

EPILOG = """\b
Exit codes: 0 done, 1 error, 2 wrong usage, 3 wrong setting, 4 damaged or unknown format, 5 versions do not
connect or nothing is published, 6 store failed, 7 not published, 8 model does not match, 9 version not
applied, 10 not served in time, 130 interrupted."""
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class Program(click.Command):
    """A program with one command. Our errors print a line and set their exit code; others print a traceback,
    exit code 1.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.context_settings = HELP_OPTIONS | dict(self.context_settings)
        complete_help(self)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _exit_codes():
            return super().invoke(ctx)


class ProgramGroup(click.Group):
    """A program with several commands. Errors are handled like in `Program`."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _exit_codes():
            return super().invoke(ctx)


def complete_help(command: click.Command) -> None:
    """Make the help of a command and its subcommands show defaults and exit codes."""
    command.epilog = EPILOG
    for option in command.params:
        if isinstance(option, click.Option) and option.show_default is None:
            option.show_default = True
    for inner in command.commands.values() if isinstance(command, click.Group) else []:
        complete_help(inner)


@contextlib.contextmanager
def _exit_codes() -> Iterator[None]:
    from deltasync.errors import DeltaSyncError, printable_traceback
    from deltasync.ops.cli.output import echo

    try:
        yield
    except DeltaSyncError as error:
        echo(f"deltasync: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        echo("deltasync: interrupted", err=True)
        sys.exit(130)
    except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise  # click handles these
    except Exception as error:  # noqa: BLE001 - printed like Python does, but printable
        for line in printable_traceback(error).splitlines():
            echo(line, err=True)
        sys.exit(1)
