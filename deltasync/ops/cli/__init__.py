"""The `deltasync` command. A command's module is imported on use, so that `--help` needs neither torch nor
vLLM.

Data goes to stdout, messages to stderr.
"""

from __future__ import annotations

import difflib
import importlib

import click

from deltasync.ops.cli.program import EPILOG, HELP_OPTIONS, ProgramGroup, complete_help

__all__ = ["main"]

# The module of each command, and its line in the help.
_COMMANDS = {
    "serve": ("serve", "Start vLLM as a replica of a channel."),
    "follow": ("follow", "Follow a channel in host memory, or refresh or pin a server."),
    "watch": ("watch", "Watch a channel in the terminal or as a web page."),
    "log": ("log", "List the versions of a channel, or show one."),
    "blame": ("log", "Show which versions changed a tensor most."),
    "diff": ("log", "Compare the bits of two versions."),
    "bisect": ("log", "Find the first version that fails a check."),
    "doctor": ("maintenance", "Test whether this machine can use a channel."),
    "check": ("maintenance", "Check that a channel is complete."),
    "repair": ("maintenance", "Restore lost objects of a channel, or store replacements."),
    "gc": ("maintenance", "Drop old versions, and delete files that no version needs."),
    "export": ("maintenance", "Write a version as a checkpoint directory."),
    "relay": ("follow", "Copy a channel to other stores, once or continuously."),
    "keygen": ("maintenance", "Make a key to sign a channel with."),
}


class _LazyGroup(ProgramGroup):
    """A group that imports the module of a command when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(
            importlib.import_module(f"deltasync.ops.cli.{_COMMANDS[cmd_name][0]}"), cmd_name
        )
        complete_help(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        near = difflib.get_close_matches(args[0], _COMMANDS, n=1)
        if args[0] not in _COMMANDS and near and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, epilog=EPILOG, context_settings=HELP_OPTIONS)
@click.version_option(package_name="deltasync")
def main() -> None:
    """Sync RL weights as the bits that changed.

    A trainer publishes versions of its weights to a channel, a URL such as file:///data/run. Replicas follow
    the channel and patch their live weights in place, bit for bit.
    """
