"""The `deltasync` command. Each command is imported when it is used, so that `--help` needs neither torch nor vLLM.

Data goes to stdout, messages to stderr.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

__all__ = ["main"]

# Module of each command, and its line in the help.
_COMMANDS = {
    "demo": ("demo", "Train a tiny model with TRL while a real vLLM follows it, on this machine."),
    "serve": ("serve", "Start vLLM as a replica of a channel."),
    "follow": ("follow", "Follow a channel with a replica in host memory."),
    "sync": ("servers", "Make a server look at its channel now."),
    "pin": ("servers", "Keep a server at a version, or let it follow again."),
    "watch": ("watch", "Watch a channel: versions, replicas, cost."),
    "dashboard": ("watch", "Show a channel as a web page, live or as one file."),
    "log": ("log", "List the versions of a channel."),
    "show": ("log", "Show one version."),
    "cost": ("cost", "Compute what a run will store, request and cost."),
    "doctor": ("doctor", "Test what this machine needs to use a channel."),
    "check": ("maintenance", "Check that a channel is complete."),
    "repair": ("maintenance", "Restore lost objects of a channel, or store other ways around them."),
    "forget": ("maintenance", "Remove versions from a channel."),
    "prune": ("maintenance", "Delete files that no version needs any more."),
    "anchor": ("anchor", "Ask a running publisher for full weights."),
    "compact": ("maintenance", "Store one delta over several versions."),
    "export": ("maintenance", "Write a version as a checkpoint directory."),
    "cp": ("maintenance", "Copy a channel to another store."),
    "relay": ("follow", "Keep copies of a channel in other stores up to date."),
    "router": ("serve", "Start HAProxy in front of several replicas."),
    "deploy": ("deploy", "Create Spaces on the Hugging Face Hub that follow a channel."),
    "keygen": ("maintenance", "Make a key to sign a channel with."),
}

_EPILOG = """\b
Exit codes: 0 done, 1 error, 2 wrong usage, 3 wrong setting, 4 damaged or unknown format, 5 versions do not
connect or nothing is published, 6 store failed, 7 not published, 8 model does not match, 9 version not
applied, 10 not served in time, 130 interrupted."""


def _complete_help(command: click.Command) -> None:
    """Make the help of a command and its subcommands show defaults and exit codes."""
    command.epilog = _EPILOG
    for option in command.params:
        if isinstance(option, click.Option) and option.show_default is None:
            option.show_default = True
    for inner in command.commands.values() if isinstance(command, click.Group) else []:
        _complete_help(inner)


class _LazyGroup(click.Group):
    """A group that imports the module of a command when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"deltasync.cli.{_COMMANDS[cmd_name][0]}"), cmd_name)
        _complete_help(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Our errors become a line on stderr and their exit code, other errors a traceback and code 1."""
        from deltasync.cli.output import echo
        from deltasync.errors import DeltaSyncError, printable_traceback

        try:
            return super().invoke(ctx)
        except DeltaSyncError as error:
            echo(f"deltasync: {error}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            echo("deltasync: interrupted", err=True)
            sys.exit(130)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click handles these
        except Exception as error:  # noqa: BLE001 - shown like Python does, but printable
            for line in printable_traceback(error).splitlines():
                echo(line, err=True)
            sys.exit(1)


@click.group(cls=_LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="deltasync")
def main() -> None:
    """RL weights travel as the bits that changed.

    A trainer publishes versions of its weights to a channel, a URL such as file:///data/run. Replicas follow the channel and
    patch their live weights in place, bit for bit.
    """
