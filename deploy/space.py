#!/usr/bin/env python
"""Create Spaces on the Hugging Face Hub, or update them: replicas of a channel, and the Wordle environment.

    make dist
    python deploy/space.py vllm user/replica-1 --package dist/deltasync-0.1.0-cp311-abi3-manylinux_2_34_x86_64.whl \
        --channel URL --model MODEL

The calls to huggingface_hub are planned as data and then made in order, so that a dry run shows exactly what
would be done. Each may be repeated. Variables and secrets of a Space are set before its files are uploaded,
which starts its build.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from deltasync.channel.signing import Trusted
from deltasync.clouds.hub import bucket_of
from deltasync.errors import ConfigError, StoreError
from deltasync.ops.cli.output import echo, echo_json
from deltasync.ops.cli.program import HELP_OPTIONS, ProgramGroup, complete_help
from deltasync.stores import open_store

_HERE = Path(__file__).parent
_FILES = _HERE / "spaces" / "vllm"
_WORDLE = _HERE.parent / "examples" / "wordle"
_NOT_UPLOADED = ("__pycache__/*", "*.egg-info/*")
_TRUSTED_KEYS = "trusted-keys"
# The last is httpx's, whichever version of httpx the client uses.
_FAILURES: tuple[type[Exception], ...] = (OSError, ValueError, HfHubHTTPError.__bases__[0])


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of a method of `HfApi`. `str` and `shown` hide the value of a secret."""

    method: str
    arguments: Mapping[str, Any]

    @property
    def shown(self) -> dict[str, Any]:
        """The arguments, without the value of a secret."""
        return {**self.arguments, **({"value": "***"} if self.method == "add_space_secret" else {})}

    def __str__(self) -> str:
        return f"{self.method}({', '.join(f'{name}={value!r}' for name, value in self.shown.items())})"

    def make(self, api: HfApi) -> Any:
        """Make the call, and return its result.

        Raises:
            StoreError: the Hub refused, or could not be reached.
        """
        try:
            return getattr(api, self.method)(**self.arguments)
        except _FAILURES as error:
            reason = " ".join(str(error).split())[:300].rstrip(".")
            raise StoreError(
                f"{self} failed: {reason}. The steps before it are done; run this again to continue."
            ) from None


def plan(
    spaces: Sequence[str],
    *,
    files: Path,
    package: str,
    variables: Mapping[str, str],
    secrets: Mapping[str, str],
    private: bool,
    hardware: str | None,
    sleep_s: int | None,
    trusted_keys: str | None = None,
) -> list[Call]:
    """Return the calls, in order, that make these Spaces, and the bucket of their channel, or bring them up
    to date.

    `files` is the folder to upload, with the Dockerfile, and `package` the requirement that pip installs, or
    the path of a wheel, which is uploaded; so is the file of public keys. Variables are the environment at
    build time and at run time, secrets at run time only. Without `hardware` a Space keeps its own; a new one
    has a free CPU. ConfigError if a file is missing or invalid, or `sleep_s` is given without `hardware`.
    """
    wheel = Path(package) if package.endswith(".whl") and "://" not in package else None
    if not (files / "Dockerfile").is_file():
        raise ConfigError(
            f"There is no {files / 'Dockerfile'}; --files names the folder, such as examples/wordle."
        )
    if wheel is not None and not wheel.is_file():
        raise ConfigError(f"There is no wheel {package}; `make dist` builds one into dist/.")
    if sleep_s is not None and hardware is None:
        raise ConfigError("When a Space sleeps can only be set together with its hardware.")
    uploads, extra = list[tuple[str, str]](), ""
    if trusted_keys is not None:
        Trusted(path=Path(trusted_keys))
        variables, extra = {**variables, "DELTASYNC_TRUSTED_KEYS": f"/app/{_TRUSTED_KEYS}"}, "[signing]"
        uploads.append((trusted_keys, _TRUSTED_KEYS))
    if wheel is not None:
        uploads.append((package, wheel.name))
        package = f"./{wheel.name}{extra}"
    channel, calls = variables.get("DELTASYNC_CHANNEL", ""), list[Call]()
    if channel.startswith("hf://"):
        calls.append(
            Call("create_bucket", {"bucket_id": bucket_of(channel)[0], "private": True, "exist_ok": True})
        )
    for space in spaces:
        name, of_space = {"repo_id": space}, {"repo_id": space, "repo_type": "space"}
        calls.append(
            Call("create_repo", {**of_space, "space_sdk": "docker", "private": private, "exist_ok": True})
        )
        for key, value in {"PACKAGE": package, **variables}.items():
            calls.append(Call("add_space_variable", {**name, "key": key, "value": value}))
        calls += [
            Call("add_space_secret", {**name, "key": key, "value": value}) for key, value in secrets.items()
        ]
        if hardware is not None:
            sleep = {} if sleep_s is None else {"sleep_time": sleep_s}
            calls.append(Call("request_space_hardware", {**name, "hardware": hardware, **sleep}))
        for path, target in uploads:
            calls.append(Call("upload_file", {**of_space, "path_or_fileobj": path, "path_in_repo": target}))
        folder = {"folder_path": str(files), "ignore_patterns": [*_NOT_UPLOADED]}
        calls += [Call("upload_folder", {**of_space, **folder}), Call("space_info", name)]
    return calls


def _require(secrets: Mapping[str, str], needed: Mapping[str, str]) -> None:
    for name, reason in needed.items():
        if not secrets.get(name):
            raise ConfigError(f"The Space needs the secret {name}: {reason}.")


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
            raise ConfigError(
                f"The value of the secret {name} is taken from the environment, where {name} is not set."
            )
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
    click.option(
        "--hardware", metavar="NAME", help="The Hub's name of the hardware, such as l4x1. Default: unchanged."
    ),
    click.option(
        "--sleep-after",
        "sleep_s",
        type=int,
        metavar="SECONDS",
        help="Stop the Space after this time without requests.",
    ),
    click.option(
        "--private", is_flag=True, help="Make the Space private: requests then need a token of the Hub."
    ),
    click.option(
        "--package",
        required=True,
        metavar="WHEEL",
        help="What pip installs in the image: a wheel, such as `make dist` builds, or any requirement that it can reach.",
    ),
    click.option("--dry-run", is_flag=True, help="Print the calls to the Hub, and make none."),
    click.option(
        "--json", "as_json", is_flag=True, help="Print the calls and the addresses of the Spaces as JSON."
    ),
)


def _with_common_options(command: Callable[..., None]) -> Callable[..., None]:
    for add in reversed(_COMMON):
        command = add(command)
    return command


@click.group("space.py", cls=ProgramGroup, context_settings=HELP_OPTIONS)
def main() -> None:
    """Create Spaces on the Hugging Face Hub, or update them: run the same command again, or with other
    options.
    """


@main.command("vllm")
@click.option("--channel", metavar="URL", required=True, help="The channel to follow. Its bucket is created.")
@click.option("--model", required=True, help="The model that the trainer starts from.")
@click.option(
    "--vllm-arguments",
    default="",
    show_default=False,
    metavar="TEXT",
    help="More arguments of vLLM, in one string.",
)
@click.option(
    "--trusted-keys",
    metavar="FILE",
    help="File of public keys, which is uploaded. Replicas accept only what one of them has signed.",
)
@_with_common_options
def vllm(
    spaces: tuple[str, ...],
    channel: str,
    model: str,
    vllm_arguments: str,
    variables: dict[str, str],
    secrets: dict[str, str],
    **options: Any,
) -> None:
    """Serve MODEL with vLLM in each of the Spaces USER/NAME, as a replica of the channel.

    This needs the secret DELTASYNC_HTTP_TOKEN, which requests must present, and HF_TOKEN for a bucket of the
    Hub:

    \b
      export HF_TOKEN=... DELTASYNC_HTTP_TOKEN=...
      make dist
      python deploy/space.py vllm user/replica-1 user/replica-2 --channel hf://buckets/user/run/a \\
        --package dist/deltasync-0.1.0-cp311-abi3-manylinux_2_34_x86_64.whl --model Qwen/Qwen3-0.6B --hardware l4x1 \\
        --secret HF_TOKEN --secret DELTASYNC_HTTP_TOKEN
    """
    url = open_store(channel).url
    if url.startswith(("memory://", "file://")):
        raise ConfigError(
            f"A Space cannot reach {url}; the channel must be a bucket, such as hf://buckets/user/run/a."
        )
    needed = {"DELTASYNC_HTTP_TOKEN": "without it anyone can use the server"}
    if url.startswith("hf://"):
        needed["HF_TOKEN"] = f"the replica reads {url} with it and writes its heartbeats there"
    _require(secrets, needed)
    more = {"VLLM_ARGUMENTS": vllm_arguments} if vllm_arguments else {}
    variables = {"DELTASYNC_CHANNEL": url, "MODEL": model, **more, **variables}
    _deploy(spaces, files=_FILES, variables=variables, secrets=secrets, **options)


@main.command("wordle")
@click.option(
    "--files",
    type=click.Path(path_type=Path),
    default=_WORDLE,
    show_default="examples/wordle",
    help="The environment's folder.",
)
@_with_common_options
def wordle(spaces: tuple[str, ...], secrets: dict[str, str], **options: Any) -> None:
    """Serve the Wordle environment in each of the Spaces USER/NAME.

    This needs the secret DELTASYNC_ENVIRONMENT_TOKEN, which requests must present:

    \b
      export DELTASYNC_ENVIRONMENT_TOKEN=...
      make dist
      python deploy/space.py wordle user/wordle --package dist/deltasync-0.1.0-cp311-abi3-manylinux_2_34_x86_64.whl \\
        --secret DELTASYNC_ENVIRONMENT_TOKEN --variable WORDS=full
    """
    _require(secrets, {"DELTASYNC_ENVIRONMENT_TOKEN": "without it anyone can use the server"})
    _deploy(spaces, secrets=secrets, **options)


def _deploy(spaces: Sequence[str], dry_run: bool, as_json: bool, **options: Any) -> None:
    calls, hosts, api = plan(spaces, **options), {}, HfApi(library_name="deltasync")
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


complete_help(main)

if __name__ == "__main__":
    main()
