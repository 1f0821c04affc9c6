"""`deltasync serve`: start vLLM as a replica of a channel."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Sequence

import click

from deltasync.errors import ConfigError
from deltasync.ops.cli.options import TRUSTED_KEYS
from deltasync.ops.cli.output import echo

_TOKEN = "DELTASYNC_HTTP_TOKEN"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_EXTENSION = "vllm_plugin.DeltaSyncWorkerExtension"
_VERSIONS = "4"  # of an adapter, that running requests may use at the same time


def vllm_command(
    model: str,
    channel: str,
    arguments: Sequence[str],
    adapter: str | None = None,
    trusted_keys: str | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the command line that starts vLLM as a replica, and the environment variables to set for it.

    vLLM's own `arguments` replace the defaults here. `adapter` is None for a channel of the model,
    `trusted_keys` None for those of the environment.
    """
    if adapter is None:
        variables, defaults = {"DELTASYNC_CHANNEL": channel}, {"--worker-extension-cls": [_EXTENSION]}
    else:
        variables = {"DELTASYNC_CHANNEL": channel, "DELTASYNC_ADAPTER": adapter}
        defaults = {"--enable-lora": [], "--max-loras": [_VERSIONS]}
    if trusted_keys is not None:
        variables["DELTASYNC_TRUSTED_KEYS"] = os.path.abspath(trusted_keys)
    # A trainer compares them with its own, so they must be those with which the tokens were sampled.
    defaults["--logprobs-mode"] = ["processed_logprobs"]
    given = {argument.split("=")[0] for argument in arguments}
    extra = [word for option, values in defaults.items() if option not in given for word in (option, *values)]
    return [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        *extra,
        *arguments,
    ], variables


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if a server cannot listen there, for example because another one does."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"Port {port} on {host or 'all addresses'} cannot be used: {error.strerror}."
            ) from None


def require_vllm() -> None:
    """Raise ConfigError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed. Run: pip install vllm (without a GPU: `make setup` in a checkout of "
            "deltasync)."
        )


@click.command("serve", params=[TRUSTED_KEYS], context_settings={"ignore_unknown_options": True})
@click.argument("model")
@click.option(
    "--channel",
    metavar="URL",
    envvar="DELTASYNC_CHANNEL",
    show_envvar=True,
    required=True,
    help="The channel to follow.",
)
@click.option(
    "--adapter",
    metavar="NAME",
    envvar="DELTASYNC_ADAPTER",
    help="The channel holds an adapter; serve it as NAME.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all addresses.")
@click.option("--port", default=8000, help="vLLM's port.")
@click.option("--dry-run", is_flag=True, help="Print the environment and the command line; start nothing.")
@click.argument("vllm_arguments", nargs=-1, type=click.UNPROCESSED)
def serve(
    model: str,
    channel: str,
    adapter: str | None,
    trusted_keys: str | None,
    host: str,
    port: int,
    dry_run: bool,
    vllm_arguments: tuple[str, ...],
) -> None:
    """Start vLLM as a replica of a channel.

    Unknown options go to vLLM. If other machines can reach the server and DELTASYNC_HTTP_TOKEN is not set, a
    token is made and printed. The same without this command:

    \b
      DELTASYNC_CHANNEL=URL vllm serve MODEL \\
        --worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension \\
        --logprobs-mode processed_logprobs --host 127.0.0.1

    With --adapter, MODEL does not change, and requests for NAME get the newest version of the adapter:

    \b
      DELTASYNC_CHANNEL=URL DELTASYNC_ADAPTER=NAME vllm serve MODEL \\
        --logprobs-mode processed_logprobs --enable-lora --max-loras 4
    """
    from deltasync.serve import startup

    startup.check_channel(channel, "--channel")
    startup.is_to_follow({name: value for name, value in os.environ.items() if name != startup.CHANNEL})
    arguments = [*vllm_arguments, "--port", str(port), "--host", host]
    line, variables = vllm_command(model, channel, arguments, adapter, trusted_keys)
    if dry_run:
        echo(
            " ".join(
                [*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(line)]
            )
        )
        return
    require_vllm()
    check_port(host, port)
    env = {**os.environ, **variables}
    if host not in _LOOPBACK and not env.get(_TOKEN):
        env[_TOKEN] = secrets.token_urlsafe(24)
        echo(
            f"deltasync: others can reach {host}, so /deltasync/* needs a token, made now: "
            f"{_TOKEN}={env[_TOKEN]}",
            err=True,
        )
        echo(
            f"deltasync: set it for trainers that use this server, or set your own {_TOKEN} before the "
            "start.",
            err=True,
        )
    os.execvpe(line[0], line, env)
