"""Make a bucket and Spaces, or bring them up to date, by calls to huggingface_hub.

The calls are planned as data and then made in order, so that a dry run shows exactly what would be done. Each may be
repeated. Variables and secrets of a Space are set before its files are uploaded, because the upload starts its build.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from deltasync.channel.signing import Trusted
from deltasync.errors import ConfigError, StoreError
from deltasync.stores import open_store
from deltasync.stores.hub import bucket_of

_FILES = Path(__file__).with_name("spaces") / "vllm"
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
    """What all Spaces of one deployment have in common: the options of `deltasync deploy space`.

    Attributes:
        files: Folder to upload: the Dockerfile and what belongs to it.
        variables: Environment at build time and at run time.
        secrets: Environment at run time, which the Hub shows to nobody.
        hardware: The Hub's name of it, None to leave it as it is; a new Space has a free CPU.
        sleep_s: The Space stops after so long without requests; only with `hardware`.
        package: What pip installs, a requirement or the path of a wheel; None for this version of deltasync.
        trusted_keys: File of public keys, which is uploaded.

    Raises:
        ConfigError: a file is missing or invalid, or `sleep_s` is given without `hardware`.
    """

    files: Path
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    secrets: Mapping[str, str] = dataclasses.field(default_factory=dict)
    private: bool = False
    hardware: str | None = None
    sleep_s: int | None = None
    package: str | None = None
    trusted_keys: str | None = None

    def __post_init__(self) -> None:
        if not (self.files / "Dockerfile").is_file():
            raise ConfigError(
                f"There is no {self.files / 'Dockerfile'}; --files names the folder, such as examples/wordle of a checkout."
            )
        if self.wheel is not None and not self.wheel.is_file():
            raise ConfigError(f"There is no wheel {self.package}.")
        if self.trusted_keys is not None:
            Trusted(path=Path(self.trusted_keys))
        if self.sleep_s is not None and self.hardware is None:
            raise ConfigError("When a Space sleeps can only be set together with its hardware.")

    @property
    def wheel(self) -> Path | None:
        """The package, if it is a wheel."""
        return Path(self.package) if self.package is not None and self.package.endswith(".whl") else None


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
    if package is None:
        package = f"deltasync{extra}=={importlib.metadata.version('deltasync')}"
    elif settings.wheel is not None:
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
