"""`deltasync deploy`: create Spaces on the Hugging Face Hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltasync.cli.output import echo, echo_json
from deltasync.errors import ConfigError

if TYPE_CHECKING:
    from deltasync.deploy.space import SpaceSettings


def _variables(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> dict[str, str]:
    values = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(f"A variable is given as NAME=VALUE, not {text!r}.")
        values[name] = value
    return values


def _secrets(ctx: click.Context, param: click.Parameter, names: Sequence[str]) -> dict[str, str]:
    for name in names:
        if not os.environ.get(name):
            raise ConfigError(f"The value of the secret {name} is taken from the environment, where {name} is not set.")
    return {name: os.environ[name] for name in names}


_COMMON = (
    click.argument("spaces", nargs=-1, required=True, metavar="USER/NAME..."),
    click.option(
        "--variable",
        "variables",
        multiple=True,
        callback=_variables,
        metavar="NAME=VALUE",
        help="A variable of the Space; repeatable.",
    ),
    click.option(
        "--secret",
        "secrets",
        multiple=True,
        callback=_secrets,
        metavar="NAME",
        help="A secret of the Space. Its value is that of the environment variable NAME; repeatable.",
    ),
    click.option("--hardware", metavar="NAME", help="The Hub's name of the hardware, such as l4x1. Default: unchanged."),
    click.option(
        "--sleep-after", "sleep_s", type=int, metavar="SECONDS", help="Stop the Space after this time without requests."
    ),
    click.option("--private", is_flag=True, help="Make the Space private: requests then need a token of the Hub."),
    click.option(
        "--package",
        metavar="REQUIREMENT",
        help="What pip installs in the image: a requirement or the path of a wheel. Default: this version of deltasync.",
    ),
    click.option("--dry-run", is_flag=True, help="Print the calls to the Hub, and make none."),
    click.option("--json", "as_json", is_flag=True, help="Print the calls and the addresses of the Spaces as JSON."),
)


def _with_common_options(command: Callable[..., None]) -> Callable[..., None]:
    for add in reversed(_COMMON):
        command = add(command)
    return command


@click.group("deploy")
def deploy() -> None:
    """Create Spaces on the Hugging Face Hub."""


@deploy.group("space")
def space() -> None:
    """Create Spaces, or update them: run the same command again, or with other options."""


@space.command("vllm")
@click.option("--channel", metavar="URL", required=True, help="The channel to follow. Its bucket is created.")
@click.option("--model", required=True, help="The model that the trainer starts from.")
@click.option(
    "--vllm-arguments", default="", show_default=False, metavar="TEXT", help="More arguments of vLLM, in one string."
)
@click.option(
    "--trusted-keys",
    metavar="FILE",
    help="File of public keys, which is uploaded. Replicas accept only what one of them has signed.",
)
@_with_common_options
def vllm(spaces: tuple[str, ...], dry_run: bool, as_json: bool, **options: Any) -> None:
    """Serve MODEL with vLLM in each of the Spaces USER/NAME, as a replica of the channel.

    This needs the secret DELTASYNC_HTTP_TOKEN, which requests must present, and HF_TOKEN for a bucket of the Hub:

    \b
      export HF_TOKEN=... DELTASYNC_HTTP_TOKEN=...
      deltasync deploy space vllm user/replica-1 user/replica-2 --channel hf://buckets/user/run/a \\
        --model Qwen/Qwen3-0.6B --hardware l4x1 --secret HF_TOKEN --secret DELTASYNC_HTTP_TOKEN
    """
    from deltasync.deploy.space import replica_settings

    _deploy(spaces, replica_settings(**options), dry_run, as_json)


@space.command("wordle")
@click.option(
    "--files",
    type=click.Path(path_type=Path),
    default=Path("examples/wordle"),
    help="The environment's folder in a checkout of deltasync.",
)
@_with_common_options
def wordle(spaces: tuple[str, ...], dry_run: bool, as_json: bool, **options: Any) -> None:
    """Serve the Wordle environment in each of the Spaces USER/NAME.

    This needs the secret DELTASYNC_ENVIRONMENT_TOKEN, which requests must present:

    \b
      export DELTASYNC_ENVIRONMENT_TOKEN=...
      deltasync deploy space wordle user/wordle --secret DELTASYNC_ENVIRONMENT_TOKEN --variable WORDS=full
    """
    from deltasync.deploy.space import environment_settings

    _deploy(spaces, environment_settings(**options), dry_run, as_json)


def _deploy(spaces: Sequence[str], settings: SpaceSettings, dry_run: bool, as_json: bool) -> None:
    from huggingface_hub import HfApi

    from deltasync.deploy.space import plan

    calls, hosts, api = plan(spaces, settings), {}, HfApi(library_name="deltasync")
    for call in calls:
        if not as_json:
            echo(str(call))
        if not dry_run:
            result = call.make(api)
            if call.method == "space_info":
                hosts[call.arguments["repo_id"]] = result.host
    if as_json:
        shown = [{"method": call.method, "arguments": call.shown} for call in calls]
        echo_json({"dry_run": dry_run, "calls": shown, "hosts": hosts})
        return
    for name, host in hosts.items():
        echo(f"{name} is being built, and will answer at {host}")
