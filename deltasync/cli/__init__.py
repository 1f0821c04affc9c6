"""The `deltasync` command. Commands are imported when used, so that `--help` needs neither torch nor vLLM.

Data goes to stdout, messages to stderr.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

__all__ = ["main"]

_COMMANDS = {
    "demo": "Train a tiny model with TRL while a real vLLM follows it, on this machine.",
    "serve": "Start vLLM as a replica of a channel.",
    "follow": "Follow a channel with a replica in host memory.",
    "sync": "Have a server look at its channel now.",
    "pin": "Keep a server at a version, or let it go on.",
    "watch": "Watch a channel: versions, replicas, cost.",
    "dashboard": "Show a channel as a page, live or as one file.",
    "log": "List the versions of a channel.",
    "show": "Show one version.",
    "doctor": "Try out what this machine needs to use a channel.",
    "check": "Check that everything that a channel promises is there.",
    "repair": "Put lost bytes of a channel back, or make ways around them.",
    "forget": "Take versions out of a channel.",
    "prune": "Delete the bytes that nothing refers to any more.",
    "fold": "Store one delta over several versions.",
    "export": "Write a version as a checkpoint directory.",
    "cp": "Copy a channel to another store.",
    "relay": "Keep copies of a channel in other stores up to date.",
    "router": "Start HAProxy in front of several replicas.",
    "deploy": "Create Spaces of the Hugging Face Hub that follow a channel.",
    "keygen": "Make a key to sign a channel with.",
}

_TOGETHER = {
    **dict.fromkeys(("check", "repair", "forget", "prune", "fold", "export", "cp"), "housekeeping"),
    **dict.fromkeys(("log", "show"), "log"),
    **dict.fromkeys(("serve", "router"), "serve"),
    **dict.fromkeys(("follow", "relay"), "follow"),
    **dict.fromkeys(("watch", "dashboard"), "watch"),
    **dict.fromkeys(("sync", "pin"), "servers"),
}
"""Modules that hold several commands."""

_EPILOG = """\b
Exit codes: 0 done, 1 error, 2 wrong usage, 3 wrong setting, 4 damaged or unknown format, 5 versions do not
connect or nothing is published, 6 store failed, 7 not published, 8 model does not match, 9 version not
applied, 10 not served in time, 130 interrupted."""


def _tell_exit_codes(command: click.Command) -> None:
    """At the end of its help, and of that of its subcommands."""
    command.epilog = _EPILOG
    for inner in command.commands.values() if isinstance(command, click.Group) else []:
        _tell_exit_codes(inner)


class _LazyGroup(click.Group):
    """Imports `deltasync.cli.<command>` only when that command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"deltasync.cli.{_TOGETHER.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, cmd_name if cmd_name in _TOGETHER else "command")
        _tell_exit_codes(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; our own errors become one sentence on stderr and their exit code, others a traceback and 1."""
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
            raise  # for click
        except Exception as error:  # noqa: BLE001 - shown as Python does, but printable
            for line in printable_traceback(error).splitlines():
                echo(line, err=True)
            sys.exit(1)


@click.group(cls=_LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="deltasync")
def main() -> None:
    """RL weights travel as the bits that changed.

    A trainer publishes versions of its weights to a channel (a URL such as file:///data/run); replicas follow it and patch
    their live weights in place, bit for bit.
    """
