#!/usr/bin/env python
"""Create Spaces on the Hugging Face Hub, or update them: replicas of a channel, and the Wordle environment.

    make dist
    python deploy/space.py vllm user/replica-1 --package dist/deltasync-0.1.0-py3-none-any.whl --channel URL --model MODEL

The calls to huggingface_hub are planned as data and then made in order, so that a dry run shows exactly what would be done.
Each may be repeated. Variables and secrets of a Space are set before its files are uploaded, which starts its build.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from deltasync.channel.signing import Trusted
from deltasync.cli.output import echo, echo_json
from deltasync.cli.program import HELP_OPTIONS, ProgramGroup, complete_help
from deltasync.errors import ConfigError, StoreError
from deltasync.stores import open_store
from deltasync.stores.hub import bucket_of

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
            raise StoreError(f"{self} failed: {reason}. What came before it is done; run this again to go on.") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpaceSettings:
    """What all Spaces of one deployment have in common: the options of this script.

    Attributes:
        secrets: Environment at run time, which the Hub shows to nobody.

    Raises:
        ConfigError: a file is missing or invalid, or `sleep_s` is given without `hardware`.
    """

    files: Path  # folder to upload: the Dockerfile and what belongs to it
    package: str  # the requirement that pip installs, or the path of a wheel, which is uploaded
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)  # environment at build time and at run time
    secrets: Mapping[str, str] = dataclasses.field(default_factory=dict)
    private: bool = False
    hardware: str | None = None  # the Hub's name of it, None to leave it as it is; a new Space has a free CPU
    sleep_s: int | None = None  # the Space stops after so long without requests; only with `hardware`
    trusted_keys: str | None = None  # file of public keys, which is uploaded

    def __post_init__(self) -> None:
        if not (self.files / "Dockerfile").is_file():
            raise ConfigError(f"There is no {self.files / 'Dockerfile'}; --files names the folder, such as examples/wordle.")
        if self.wheel is not None and not self.wheel.is_file():
            raise ConfigError(f"There is no wheel {self.package}; `make dist` builds one into dist/.")
        if self.trusted_keys is not None:
            Trusted(path=Path(self.trusted_keys))
        if self.sleep_s is not None and self.hardware is None:
            raise ConfigError("When a Space sleeps can only be set together with its hardware.")

    @property
    def wheel(self) -> Path | None:
        """The package, if it is a wheel."""
        return Path(self.package) if self.package.endswith(".whl") and "://" not in self.package else None


def replica_settings(
    channel: str,
    model: str,
    *,
    vllm_arguments: str = "",
    variables: Mapping[str, str],
    secrets: Mapping[str, str],
    **others: Any,
) -> SpaceSettings:
    """Settings of a Space that serves `model` and follows `channel`.

    Raises:
        ConfigError: a Space cannot reach the channel, or a secret is missing that it needs.
    """
    url = open_store(channel).url
    if url.startswith(("memory://", "file://")):
        raise ConfigError(f"A Space cannot reach {url}; the channel must be a bucket, such as hf://buckets/user/run/a.")
    needed = {"DELTASYNC_HTTP_TOKEN": "without it anyone can use the server"}
    if url.startswith("hf://"):
        needed["HF_TOKEN"] = f"the replica reads {url} with it and writes its heartbeats there"
    _require(secrets, needed)
    named = {"DELTASYNC_CHANNEL": url, "MODEL": model}
    if vllm_arguments:
        named["VLLM_ARGUMENTS"] = vllm_arguments
    return SpaceSettings(files=_FILES, variables={**named, **variables}, secrets=secrets, **others)


def environment_settings(*, secrets: Mapping[str, str], **others: Any) -> SpaceSettings:
    """Settings of a Space that serves an environment, such as Wordle. Raises ConfigError if a secret is missing."""
    _require(secrets, {"DELTASYNC_ENVIRONMENT_TOKEN": "without it anyone can use the server"})
    return SpaceSettings(secrets=secrets, **others)


def _require(secrets: Mapping[str, str], needed: Mapping[str, str]) -> None:
    for name, reason in needed.items():
        if not secrets.get(name):
            raise ConfigError(f"The Space needs the secret {name}: {reason}.")


def plan(spaces: Sequence[str], settings: SpaceSettings) -> list[Call]:
    """The calls, in order, that make the bucket of the channel and these Spaces, or bring them up to date."""
    channel, calls = settings.variables.get("DELTASYNC_CHANNEL", ""), list[Call]()
    if channel.startswith("hf://"):
        calls = [Call("create_bucket", {"bucket_id": bucket_of(channel)[0], "private": True, "exist_ok": True})]
    for space in spaces:
        calls += _space(space, settings)
    return calls


def _space(space: str, settings: SpaceSettings) -> Iterator[Call]:
    of_space = {"repo_id": space, "repo_type": "space"}
    yield Call("create_repo", {**of_space, "space_sdk": "docker", "private": settings.private, "exist_ok": True})
    variables, package, extra = dict(settings.variables), settings.package, ""
    if settings.trusted_keys is not None:
        variables["DELTASYNC_TRUSTED_KEYS"], extra = f"/app/{_TRUSTED_KEYS}", "[signing]"
    if settings.wheel is not None:
        package = f"./{settings.wheel.name}{extra}"
    for key, value in {"PACKAGE": package, **variables}.items():
        yield Call("add_space_variable", {"repo_id": space, "key": key, "value": value})
    for key, value in settings.secrets.items():
        yield Call("add_space_secret", {"repo_id": space, "key": key, "value": value})
    if settings.hardware is not None:
        sleep = {} if settings.sleep_s is None else {"sleep_time": settings.sleep_s}
        yield Call("request_space_hardware", {"repo_id": space, "hardware": settings.hardware, **sleep})
    if settings.trusted_keys is not None:
        yield Call("upload_file", {**of_space, "path_or_fileobj": settings.trusted_keys, "path_in_repo": _TRUSTED_KEYS})
    if (wheel := settings.wheel) is not None:
        yield Call("upload_file", {**of_space, "path_or_fileobj": settings.package, "path_in_repo": wheel.name})
    yield Call("upload_folder", {**of_space, "folder_path": str(settings.files), "ignore_patterns": [*_NOT_UPLOADED]})
    yield Call("space_info", {"repo_id": space})


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
        required=True,
        metavar="WHEEL",
        help="What pip installs in the image: a wheel, such as `make dist` builds, or any requirement that it can reach.",
    ),
    click.option("--dry-run", is_flag=True, help="Print the calls to the Hub, and make none."),
    click.option("--json", "as_json", is_flag=True, help="Print the calls and the addresses of the Spaces as JSON."),
)


def _with_common_options(command: Callable[..., None]) -> Callable[..., None]:
    for add in reversed(_COMMON):
        command = add(command)
    return command


@click.group("space.py", cls=ProgramGroup, context_settings=HELP_OPTIONS)
def main() -> None:
    """Create Spaces on the Hugging Face Hub, or update them: run the same command again, or with other options."""


@main.command("vllm")
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
      make dist
      python deploy/space.py vllm user/replica-1 user/replica-2 --channel hf://buckets/user/run/a \\
        --package dist/deltasync-0.1.0-py3-none-any.whl --model Qwen/Qwen3-0.6B --hardware l4x1 \\
        --secret HF_TOKEN --secret DELTASYNC_HTTP_TOKEN
    """
    _deploy(spaces, replica_settings(**options), dry_run, as_json)


@main.command("wordle")
@click.option(
    "--files",
    type=click.Path(path_type=Path),
    default=_WORDLE,
    show_default="examples/wordle",
    help="The environment's folder.",
)
@_with_common_options
def wordle(spaces: tuple[str, ...], dry_run: bool, as_json: bool, **options: Any) -> None:
    """Serve the Wordle environment in each of the Spaces USER/NAME.

    This needs the secret DELTASYNC_ENVIRONMENT_TOKEN, which requests must present:

    \b
      export DELTASYNC_ENVIRONMENT_TOKEN=...
      make dist
      python deploy/space.py wordle user/wordle --package dist/deltasync-0.1.0-py3-none-any.whl \\
        --secret DELTASYNC_ENVIRONMENT_TOKEN --variable WORDS=full
    """
    _deploy(spaces, environment_settings(**options), dry_run, as_json)


def _deploy(spaces: Sequence[str], settings: SpaceSettings, dry_run: bool, as_json: bool) -> None:
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


complete_help(main)

if __name__ == "__main__":
    main()
