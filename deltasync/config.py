"""Settings, each a frozen keyword-only dataclass, and the only reader of `DELTASYNC_*`.

An explicit argument (anything but None) beats the environment, which beats the default.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
import socket
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, TypedDict

from deltasync.errors import ConfigError

CODECS = ("packed", "context", "raw")
AUTO = "auto"
"""The `codec` of a publisher that chooses between `packed` and `context` itself (`deltasync.publish.choose`)."""
_CASTS = "(bfloat16|float16|float32|keep)"
DTYPE = rf"fp8|{_CASTS}(,[^,=]+={_CASTS})*"
"""How a setting says the dtype of each tensor (`deltasync.tensors.bits.dtype_for`)."""
_DTYPES = "one of bfloat16, float16, float32, fp8, keep, or dtypes by names as in bfloat16,*.router.*=float32"
PIN = r"newest|(?P<version>[1-9][0-9]{0,17})|every (?P<every>[1-9][0-9]{0,8})|(?P<behind>[1-9][0-9]{0,8}) behind"
"""How a setting says which versions a replica takes (`deltasync.replicas.Pin`)."""


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What values of a setting are allowed beside their type."""

    said: str
    pattern: str = ""
    least: float = -math.inf
    above: float = -math.inf

    def allows(self, value: Any) -> bool:
        if self.pattern:
            return re.fullmatch(self.pattern, value) is not None
        return bool(value >= self.least and value > self.above)


def _one_of(*names: str) -> _Rule:
    return _Rule(f"one of {', '.join(names)}", pattern="|".join(names))


_Natural = Annotated[int, _Rule("at least 0", least=0)]
_Positive = Annotated[int, _Rule("at least 1", least=1)]
_Seconds = Annotated[float, _Rule("at least 0", least=0)]
_PositiveSeconds = Annotated[float, _Rule("more than 0", above=0)]
_Name = Annotated[str, _Rule("1 to 100 letters, digits, '.', '_' or '-'", pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")]
_KINDS: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a text"),
    Path: (os.PathLike, "a path"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    """Reads each field `x` from `DELTASYNC_X` where no argument was given. Types and rules are checked when one is made."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self), include_extras=True)
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name), hints[field.name], shown=field.repr)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **explicit: Any) -> Self:
        """Settings from explicit arguments, then the environment, then defaults.

        Args:
            environ: Read instead of `os.environ`, for tests.
            **explicit: Fields by name; None means "not given".

        Raises:
            ConfigError: unknown field, or a value that does not parse or is out of range.
        """
        env = os.environ if environ is None else environ
        hints = typing.get_type_hints(cls)
        unknown = explicit.keys() - hints.keys()
        if unknown:
            raise ConfigError(f"Unknown setting: {', '.join(sorted(unknown))}.")
        values = {}
        for field in dataclasses.fields(cls):
            value = explicit.get(field.name)
            variable = f"DELTASYNC_{field.name.upper()}"
            if value is None and env.get(variable):
                value = _parse(variable, env[variable], hints[field.name])
            if value is not None:
                values[field.name] = value
        return cls(**values)


def _parse(variable: str, text: str, hint: Any) -> Any:
    hint = next(option for option in _options(hint) if option is not type(None))
    if hint is bool:
        _require(text in ("0", "1"), f"{variable} must be 0 or 1, not {text!r}.")
        return text == "1"
    try:
        return hint(text)
    except ValueError:
        raise ConfigError(f"{variable}={text!r} is not a valid {hint.__name__}.") from None


def _options(hint: Any) -> tuple[Any, ...]:
    """The types of a union; of anything else itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _check(name: str, value: Any, hint: Any, shown: bool) -> None:
    """Hold a value to its annotation; ConfigError if it is of another type, or out of range."""
    options = _options(hint)
    if value is None and type(None) in options:
        return
    given = f"not {value!r}" if shown else "and this one (not shown) is not"
    rules: list[_Rule] = [rule for option in options for rule in getattr(option, "__metadata__", ())]
    kinds = [_KINDS[getattr(option, "__origin__", option)] for option in options if option is not type(None)]
    fits = any(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) for kind, _ in kinds)
    said = " or ".join([rule.said for rule in rules if rule.pattern] or [said for _, said in kinds])
    _require(fits and value == value, f"{name} must be {said}, {given}.")
    for rule in rules:
        _require(rule.allows(value), f"{name} must be {rule.said}, {given}.")


def whole_number(name: str, value: Any, least: int = -(1 << 63)) -> int:
    """A whole number of 64 bits that somebody gave, also one of numpy's.

    Raises:
        ConfigError: it is something else, or less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) < 1 << 63:
        bound = f"from {least} on" if least > 0 else "of 64 bits"
        raise ConfigError(f"{name} must be a whole number {bound}, not {value!r}.")
    return int(value)


def token_ages(value: Any) -> tuple[float, float, float]:
    """Mean, 95th percentile and maximum age of tokens, in versions, that somebody gave.

    Raises:
        ConfigError: they are something else, or what no reader of the record would take.
    """
    ages = value if isinstance(value, Sequence) else ()
    if len(ages) != 3 or not all(isinstance(age, numbers.Real) and 0 <= float(age) < 1 << 63 for age in ages):
        raise ConfigError(f"token_lag must be three numbers from 0 on, not {value!r}.")
    return float(ages[0]), float(ages[1]), float(ages[2])


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderSettings(_Settings):
    """What a reader takes.

    Attributes:
        trusted_keys: File of public keys (`signing.Trusted`); what none of them has signed is refused. None to take all.
        max_age_s: Refuse to go on while the newest version was encoded longer ago; None for no limit.
    """

    trusted_keys: str | Path | None = None
    max_age_s: _PositiveSeconds | None = None


class PublisherOptions(TypedDict, total=False):
    """The fields of `PublisherSettings`; None, or nothing, for what the environment or the default says."""

    codec: str | None
    anchor_every: int | None
    dtype: str | None
    shadow_placement: str | None
    shard_bytes: int | None
    anchor_compression: str | None
    retries: int | None
    retry_delay_s: float | None
    settle_s: float | None
    peer_timeout_s: float | None
    signing_key: str | Path | None
    trusted_keys: str | Path | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublisherSettings(_Settings):
    """How a publisher writes.

    Attributes:
        codec: Encoding of deltas, one of `CODECS`. Or `auto`: for each, `packed` or `context`, whichever is served sooner on
            the link that was measured. A sharded trainer stays at `packed`.
        anchor_every: An anchor accompanies at least every N-th version; by default every 100th, but not after one that is
            a reference. It also does when replaying the chain since the last anchor would cost more bytes than an anchor.
        dtype: Served dtype: floating tensors are cast to it (round to nearest even); `fp8` quantizes matrices by blocks, see
            `quantize`; `keep` publishes as given. All but `fp8` may be followed by patterns of names with dtypes of their
            own, of which the last that matches decides: `bfloat16,*.router.*=float32`.
        shadow_placement: Where tensors of an accelerator are compared with what was published last. `device`: there, with a
            second copy of those bits in its memory, and only what changed crosses to the host. `host`: all weights cross.
            `auto`: the former for CUDA tensors where training and a tenth of the device's memory leave room for it.
        shard_bytes: Largest weight file of an anchor (a single larger tensor still makes one file).
        anchor_compression: `none`, for anchors that transformers and vLLM load, or `zstd`, for smaller ones.
        retries: Attempts after the first one for a transient store error.
        retry_delay_s: Wait before the first retry, doubled each time, at most 30 s.
        settle_s: Where the store cannot decide which of two publishers may write, how long one that opens a channel waits
            for requests of the one before (`publish.log.Lease`).
        peer_timeout_s: How long the ranks of a sharded trainer wait for one that is behind, or dead.
        signing_key: File of the private key that documents are signed with (`signing.Signer`); None to not sign.
        trusted_keys: File of the public keys of those who wrote before, if they had other ones.
    """

    codec: Annotated[str, _one_of(*CODECS, AUTO)] = "packed"
    anchor_every: _Positive | None = None
    dtype: Annotated[str, _Rule(_DTYPES, DTYPE)] = "bfloat16"
    shadow_placement: Annotated[str, _one_of("auto", "device", "host")] = "auto"
    shard_bytes: _Positive = 1 << 26
    anchor_compression: Annotated[str, _one_of("none", "zstd")] = "none"
    retries: _Natural = 6
    retry_delay_s: _Seconds = 0.25
    settle_s: _Seconds = 30.0
    peer_timeout_s: _PositiveSeconds = 600.0
    signing_key: str | Path | None = None
    trusted_keys: str | Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention(_Settings):
    """How a publisher looks after its channel in the background. By default it does nothing: all versions stay.

    Attributes:
        fold_every: Write a fold over every N versions, for replicas that catch up; 0 for none. Costs memory for the changes
            of N versions, and the time to encode them with the last one.
        keep_last: Keep the newest N versions and their bases; None to keep all.
        keep_anchors: Also keep the newest N versions with full weights.
        prune_grace_s: Delete the bytes of what was forgotten longer ago; more than the slowest replica takes to
            load full weights.
    """

    fold_every: _Natural = 0
    keep_last: _Positive | None = None
    keep_anchors: _Positive | None = None
    prune_grace_s: _Seconds = 3600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.fold_every != 1, "fold_every must be 0, or at least 2 versions.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerSettings(_Settings):
    """How a trainer keeps step with its fleet.

    Attributes:
        max_behind: Versions that the fleet may serve behind the newest one while training goes on; 0 to wait for each. None
            leaves it to the kind of trainer.
    """

    max_behind: _Natural | None = None


def _default_replica_id() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[-64:].lstrip("-") or "replica"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaSettings(ReaderSettings):
    """How a replica follows; also `ReaderSettings`.

    Attributes:
        channel: URL of the channel, or several of it and its copies with spaces between them; None when deltasync is not
            configured.
        adapter: Name under which vLLM serves the adapter that the channel holds; None if it holds the served model.
        allowed_channels: Prefixes, with commas between them, of the channels that callers of vLLM's weight-transfer routes
            may name instead of `channel`, such as `s3://bucket/runs`; None for no other channel.
        replica_id: Name of the heartbeat object: the host's by default, for a server with its port (`at_port`).
        pin: The versions to take: `newest`, a number to stay at, `every 10` for multiples, `2 behind` the newest.
        poll_interval_s: Longest wait between two requests for the next version; the wait backs off up to this.
        heartbeat_interval_s: Longest wait between two heartbeats; one is also written at every change.
        audit_interval_s: How often all bits in memory are read and held to the version, while no other version is there to
            be taken; 0 for never.
        ready_behind: Versions that a server may lie behind the newest and still call itself ready.
        wait_ready: Answer no request before the server was ready once.
        kv_cache: `keep` the keys and values of running requests over a commit, or `recompute` them with the new weights.
        cache_dir: Where the processes of a machine share what they download, an absolute path; None for a directory of this
            user's in the system's temporary one.
        cache_bytes: Most bytes of files in it; 0 for no cache.
        digest_route: Offer `GET /deltasync/digest`, which reads all live weights between two engine steps; for tests.
        http_token: What requests to the replica's routes must present; None leaves them open. Never shown.
    """

    channel: str | None = None
    adapter: _Name | None = None
    allowed_channels: str | None = None
    replica_id: _Name = dataclasses.field(default_factory=_default_replica_id)
    pin: Annotated[str, _Rule("newest, a version, `every K` or `K behind`", pattern=PIN)] = "newest"
    poll_interval_s: _PositiveSeconds = 1.0
    heartbeat_interval_s: _PositiveSeconds = 10.0
    audit_interval_s: _Seconds = 3600.0
    ready_behind: _Natural = 8
    wait_ready: bool = False
    kv_cache: Annotated[str, _one_of("keep", "recompute")] = "keep"
    cache_dir: str | None = None
    cache_bytes: _Natural = 4 << 30
    digest_route: bool = False
    http_token: Annotated[str, _Rule("visible ASCII characters without spaces", pattern="[!-~]+")] | None = (
        dataclasses.field(default=None, repr=False)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.cache_dir is None or os.path.isabs(self.cache_dir),
            f"cache_dir must be an absolute path, not {self.cache_dir!r}.",
        )
        _require(
            all("://" in prefix and _is_plain(prefix) for prefix in self._prefixes),
            "allowed_channels must be prefixes of URLs with commas between them, without options (`?`) and without `..`.",
        )

    @property
    def _prefixes(self) -> list[str]:
        found = [prefix.strip().rstrip("/") for prefix in (self.allowed_channels or "").split(",")]
        return [prefix for prefix in found if prefix]

    def at_port(self, port: int, rank: int | None = None) -> Self:
        """These settings with a name that is the same when the server starts again at its port, unless a name was given.

        `rank` is the engine's, where several share one port.
        """
        if self.replica_id != _default_replica_id():
            return self
        place = f"{self.replica_id}-{port}" + ("" if rank is None else f"-{rank}")
        return dataclasses.replace(self, replica_id=place)

    def with_called_channel(self, channel: str | None) -> Self:
        """These settings with the channel that a caller over the network names, None for the configured one.

        Raises:
            ConfigError: it is another one than the configured one, and not below one of `allowed_channels`; or it has
                options, by which a caller could choose a server (`?endpoint=`).
        """
        if channel is None or channel == self.channel:
            return self
        _require(
            isinstance(channel, str) and _is_plain(channel),
            "A channel that a caller names has no '?', '#', '%' and '..': options are for who starts the server.",
        )
        below = any(channel == prefix or channel.startswith(f"{prefix}/") for prefix in self._prefixes)
        configured = "follows no channel" if self.channel is None else "follows the channel of its DELTASYNC_CHANNEL"
        _require(
            below,
            f"This server {configured}, and callers may not name {channel!r}, which is not in DELTASYNC_ALLOWED_CHANNELS.",
        )
        return dataclasses.replace(self, channel=channel)


def _is_plain(url: str) -> bool:
    """Whether a URL is nothing but a place, spelled in one way."""
    return re.search(r"[?#%\\\s]", url) is None and not {".", ".."} & set(url.split("/"))
