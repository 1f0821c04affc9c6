"""Settings. Only this module reads the environment variables `DELTASYNC_*`, and refuses those that it does
not know.

An explicit argument other than None beats the environment, which beats the default.
"""

from __future__ import annotations

import dataclasses
import difflib
import numbers
import os
import re
import socket
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, TypedDict

from deltasync.errors import ConfigError

CODECS = ("packed", "context", "raw")
AUTO = "auto"  # `dtype`: by each tensor's own
_CASTS = "(bfloat16|float16|float32|keep)"
# pattern of the setting `dtype` (`deltasync.tensors.bits.dtype_for`)
DTYPE = rf"fp8|({AUTO}|{_CASTS})(,[^,=]+={_CASTS})*"
_DTYPES = "one of auto, bfloat16, float16, float32, fp8, keep, or with patterns of names as in auto,*.router.*=float32"
PIN = r"newest|[1-9][0-9]{0,17}"
"""Pattern of the setting `pin`."""

Pin = int | None
"""The version that a replica stays at; None to take every new one."""


def parse_pin(text: str) -> Pin:
    """Parse `newest` or a version's number. Raises ConfigError for anything else."""
    if re.fullmatch(PIN, text.strip()) is None:
        raise ConfigError(f"A pin is newest or a version's number, not {text!r}.")
    return None if text.strip() == "newest" else int(text)


def pin_text(pin: Pin) -> str:
    """Return the text that `parse_pin` parses."""
    return "newest" if pin is None else str(pin)


def environment() -> Mapping[str, str]:
    """Return this process's variables."""
    return os.environ


def simd() -> str:
    """Return the widest instructions that `kernels.native` may use (`DELTASYNC_SIMD`): tests compare them.

    Raises ConfigError unless it is `none` (numpy), `plain` (portable C), `avx2` or, by default, `avx512`.
    """
    found = os.environ.get("DELTASYNC_SIMD", "avx512")
    if found not in ("none", "plain", "avx2", "avx512"):
        raise ConfigError(f"DELTASYNC_SIMD is {found!r:.40}, not none, plain, avx2 or avx512.")
    return found


def client_threads() -> int:
    """Return how many threads the runtime of the object stores' clients starts."""
    count = environment().get("TOKIO_WORKER_THREADS", "")
    return int(count) if count.isdecimal() else os.cpu_count() or 1


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError if settings are given that are not known; it names the nearest ones."""
    names, sentences = sorted(known), []
    for name in sorted({*given} - {*names}):
        near = difflib.get_close_matches(name.lower(), names, n=1) or [each for each in names if name in each]
        sentences.append(
            f"Unknown setting: {name}. "
            + (f"Did you mean {near[0]}?" if near else f"Known: {', '.join(names)}.")
        )
    if sentences:
        raise ConfigError(" ".join(sentences))


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The allowed values of a setting: a description for messages, and a test."""

    description: str
    allows: Callable[[Any], object]


def _matches(description: str, pattern: str) -> _Rule:
    return _Rule(description, re.compile(pattern).fullmatch)


def _one_of(*names: str) -> _Rule:
    return _matches(f"one of {', '.join(names)}", "|".join(names))


_Natural = Annotated[int, _Rule("at least 0", lambda value: value >= 0)]
_Positive = Annotated[int, _Rule("at least 1", lambda value: value >= 1)]
_NaturalButOne = Annotated[int, _Rule("0, or at least 2", lambda value: value == 0 or value >= 2)]
_Seconds = Annotated[float, _Rule("at least 0", lambda value: value >= 0)]
_PositiveSeconds = Annotated[float, _Rule("more than 0", lambda value: value > 0)]
_Name = Annotated[
    str, _matches("1 to 100 letters, digits, '.', '_' or '-'", r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
]
_AbsolutePath = Annotated[str, _Rule("an absolute path", os.path.isabs)]
_KINDS: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a text"),
    Path: (os.PathLike, "a path"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class. A field `x` without an argument is read from `DELTASYNC_X`. Types and rules are checked on
    creation.
    """

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Refuse other names than those of the fields."""
        check_names(given, [field.name for field in dataclasses.fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self), include_extras=True)
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name), hints[field.name], shown=field.repr)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **explicit: Any) -> Self:
        """Return settings from explicit arguments (None means "not given"), else the environment, else the
        defaults.

        `environ` replaces `os.environ` in tests. Raises ConfigError if a field or a variable is unknown, or a
        value does not parse or is out of range.
        """
        env = os.environ if environ is None else environ
        _check_variables(env)
        hints, rules = typing.get_type_hints(cls), typing.get_type_hints(cls, include_extras=True)
        check_names(explicit, hints)
        values = {}
        for field in dataclasses.fields(cls):
            value = explicit.get(field.name)
            variable = f"DELTASYNC_{field.name.upper()}"
            if value is None and field.name in _NOT_EMPTY and env.get(variable) == "":
                raise ConfigError(
                    f"{variable} is empty, as where a secret is missing: set it, or unset it to go without."
                )
            if value is None and env.get(variable):
                value = _parse(variable, env[variable], hints[field.name])
                _check(variable, value, rules[field.name], shown=field.repr)
            if value is not None:
                values[field.name] = value
        return cls(**values)


# an empty variable would turn a protection off unseen
_NOT_EMPTY = {"http_token", "trusted_keys", "signing_key"}
_OTHER_VARIABLES = {"DELTASYNC_ENVIRONMENT_TOKEN", "DELTASYNC_SIMD"}  # of the Wordle example, and see `simd`
_OF_KUBERNETES = re.compile(
    r"DELTASYNC_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""What Kubernetes sets in each container for a Service whose name begins with `deltasync`."""


def _check_variables(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a variable that is set looks like one of ours and is none, such as a misspelt
    one.
    """
    kinds, known = [Settings], set(_OTHER_VARIABLES)
    for kind in kinds:
        kinds += kind.__subclasses__()
        known |= {f"DELTASYNC_{field.name.upper()}" for field in dataclasses.fields(kind)}
    for name, value in environ.items():
        if (
            value == ""
            or name in known
            or _OF_KUBERNETES.fullmatch(name)
            or not re.search("DELTA|SYN", name.upper())
        ):
            continue
        is_ours = name.upper().startswith("DELTASYNC_")
        # Without the prefix only what is off by a letter or a dash is taken for one of ours.
        found = difflib.get_close_matches(name.upper(), sorted(known), n=1, cutoff=0.0 if is_ours else 0.93)
        if found:
            raise ConfigError(
                f"{name} is not a setting of deltasync; the nearest is {found[0]}. Rename or unset it."
            )


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
    """Return the members of a union type, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _check(name: str, value: Any, hint: Any, shown: bool) -> None:
    """Raise ConfigError if a value does not have the annotated type or breaks its rules."""
    options = _options(hint)
    if value is None and type(None) in options:
        return
    given = f"not {value!r}" if shown else "and this one (not shown) is not"
    rules: list[_Rule] = [rule for option in options for rule in getattr(option, "__metadata__", ())]
    types_allowed = [getattr(option, "__origin__", option) for option in options if option is not type(None)]
    kinds = [_KINDS[allowed] for allowed in types_allowed]
    fits = any(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) for kind, _ in kinds)
    expected = (
        [rule.description for rule in rules]
        if rules and types_allowed == [str]
        else [text for _, text in kinds]
    )
    # NaN differs from itself
    _require(fits and value == value, f"{name} must be {' or '.join(expected)}, {given}.")
    for rule in rules:
        _require(bool(rule.allows(value)), f"{name} must be {rule.description}, {given}.")


def whole_number(name: str, value: Any, least: int = -(1 << 63)) -> int:
    """Convert an argument to a 64-bit int of at least `least`. Integers of numpy are allowed. Else raises
    ConfigError.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, numbers.Integral)
        or not least <= int(value) < 1 << 63
    ):
        bound = f"from {least} on" if least > 0 else "of 64 bits"
        raise ConfigError(f"{name} must be a whole number {bound}, not {value!r}.")
    return int(value)


def token_ages(value: Any) -> tuple[float, float, float]:
    """Convert the argument `token_lag` to floats: mean, 95th percentile and maximum age of tokens, in
    versions.
    """
    ages = value if isinstance(value, Sequence) else ()
    if len(ages) != 3 or not all(isinstance(age, numbers.Real) and 0 <= float(age) < 1 << 63 for age in ages):
        raise ConfigError(f"token_lag must be three numbers from 0 on, not {value!r}.")
    return float(ages[0]), float(ages[1]), float(ages[2])


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderSettings(Settings):
    """The objects that a reader accepts.

    Attributes:
        trusted_keys: File of public keys (`signing.Trusted`). Objects that none of them has signed are
            refused. None accepts everything.
        max_age_s: Largest age of the newest version; reading raises an error when it is older. None for no
            limit.
        reference_repos: Models on the Hub, separated by commas, that are downloaded with this machine's token
            even if an unsigned record refers to them; None for none.
    """

    trusted_keys: str | Path | None = None
    max_age_s: _PositiveSeconds | None = None
    reference_repos: str | None = None


class PublisherOptions(TypedDict, total=False):
    """The fields of `PublisherSettings` as arguments. None or missing: the environment or the default
    decides.
    """

    codec: str | None
    anchor_every: int | None
    dtype: str | None
    shadow: str | None
    retries: int | None
    retry_delay_s: float | None
    peer_timeout_s: float | None
    signing_key: str | Path | None
    trusted_keys: str | Path | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublisherSettings(Settings):
    """Settings of a publisher.

    Attributes:
        codec: Encoding of deltas: `context`, the smallest; `packed`, the least work; `raw`, readable with
            safetensors alone.
        anchor_every: Write an anchor at least every N versions. By default full weights are the last resort:
            late joiners load compactions (`Retention.compact_every`), and an anchor is written only when a
            compaction would no longer be small.
        dtype: Served dtype. `auto` keeps floating tensors of 16 bits or fewer, and casts wider ones, such as
            float32 masters, to bfloat16; a run that is resumed keeps its own rule. The name of a dtype casts
            all floating tensors to it (round to nearest even); `fp8` quantizes matrices by blocks, see
            `quantize`; `keep` casts nothing. All but `fp8` may be followed by patterns of names with their
            own dtypes, as in `auto,*.router.*=float32`; the last matching pattern counts.
        shadow: Place of the last published bits, with which weights are compared. `device` is where the
            tensors are, so that only what changed leaves it; with `host` all weights of an accelerator cross.
            `auto` means `device` for CUDA tensors of one device if room for training and a tenth of its
            memory remain. It is chosen once, with the first stream.
        retries: Attempts after the first one for a transient store error.
        retry_delay_s: Wait before the first retry, doubled each time, at most 30 s.
        peer_timeout_s: Longest wait of a sharded trainer's ranks for a slow or dead rank.
        signing_key: File of the private key that signs documents (`signing.Signer`); None for no signatures.
        trusted_keys: File of the public keys of earlier publishers, if they signed with other keys.
    """

    codec: Annotated[str, _one_of(*CODECS)] = "context"
    anchor_every: _Positive | None = None
    dtype: Annotated[str, _matches(_DTYPES, DTYPE)] = AUTO
    shadow: Annotated[str, _one_of("auto", "device", "host")] = "auto"
    retries: _Natural = 6
    retry_delay_s: _Seconds = 0.25
    peer_timeout_s: _PositiveSeconds = 600.0
    signing_key: str | Path | None = None
    trusted_keys: str | Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention(Settings):
    """A publisher's background maintenance of its channel. By default all versions are kept, with a log line
    that says so.

    Attributes:
        compact_every: Write a compaction from the newest full weights every N versions, for late joiners; 0
            for none. By default as often as all compactions and anchors together stay below a third of the
            deltas' bytes. The steps since the full weights are kept in host memory for it: at most 1.25 times
            the published bytes, on each rank of a sharded trainer those of the ranges that it holds.
        keep_last: Keep the newest N versions and their bases; None to keep all.
        grace_s: Time between forgetting a version and deleting its files. It must exceed the time in which
            the slowest replica loads full weights.
    """

    compact_every: _NaturalButOne | None = None
    keep_last: _Positive | None = None
    grace_s: _Seconds = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerSettings(Settings):
    """Settings of a trainer that waits for its fleet.

    Attributes:
        max_behind: Number of versions that the fleet may be behind the newest one while training continues; 0
            to wait for each version, None for the trainer's default.
    """

    max_behind: _Natural | None = None


def _is_plain(url: str) -> bool:
    """Whether a URL has no options, no escapes and no `.` or `..` parts, so that prefixes of it can be
    compared.
    """
    return re.search(r"[?#%\\\s]", url) is None and not {".", ".."} & set(url.split("/"))


def _prefixes(text: str | None) -> list[str]:
    prefixes = (prefix.strip().rstrip("/") for prefix in (text or "").split(","))
    return [prefix for prefix in prefixes if prefix]


_CHANNEL_PREFIXES = _Rule(
    "prefixes of URLs, separated by commas, without options (`?`) and `..`",
    lambda text: all("://" in prefix and _is_plain(prefix) for prefix in _prefixes(text)),
)


def _default_replica_id() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[-64:].lstrip("-") or "replica"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaSettings(ReaderSettings):
    """Settings of a replica, in addition to `ReaderSettings`.

    Attributes:
        channel: URL of the channel, or of the channel and its copies, separated by spaces; None if deltasync
            is not configured.
        adapter: Name under which an engine serves the channel's adapter; None if the channel has the served model.
        allowed_channels: Prefixes of channels, separated by commas, such as `s3://bucket/runs`. Callers of
            vLLM's weight-transfer routes may name these instead of `channel`. None for no other channel.
        replica_id: Name of the heartbeat object. By default the host's name, for a server with its port
            (`at_port`).
        pin: The version to stay at, or `newest` to take every new one.
        poll_interval_s: Longest wait between two requests for the next version; the wait backs off up to
            this.
        ready_behind: Number of versions that a ready server may be behind the newest.
        ready_in_outage: Whether a server that serves a proven version stays ready while the store cannot be
            reached. All replicas share it: if they left together, nobody would answer. They may then serve
            old weights.
        wait_ready: Whether requests wait until the server was ready once. Otherwise the initially loaded
            weights answer.
        audit_s: Shortest time between two comparisons of all bits of a followed module with its version; 0
            compares in each `sync` and before each new version.
        kv_cache: `keep` the keys and values of running requests across a commit, or `recompute` them with the
            new weights.
        max_lag: The maximum lag of requests that name none (`x-deltasync-max-lag`), in versions; None for no
            limit.
        cache_dir: Absolute path of the directory in which the processes of a machine share downloads; None
            for a directory of this user in the system's temporary directory.
        cache_bytes: Limit for the files in the cache; 0 for no cache.
        http_token: Token that requests to the replica's routes must present; None for no token. Never shown.
    """

    channel: str | None = None
    adapter: _Name | None = None
    allowed_channels: Annotated[str, _CHANNEL_PREFIXES] | None = None
    replica_id: _Name = dataclasses.field(default_factory=_default_replica_id)
    pin: Annotated[str, _matches("newest or a version", PIN)] = "newest"
    poll_interval_s: _PositiveSeconds = 1.0
    ready_behind: _Natural = 8
    ready_in_outage: bool = True
    wait_ready: bool = True
    audit_s: _Seconds = 0.0
    kv_cache: Annotated[str, _one_of("keep", "recompute")] = "keep"
    max_lag: _Natural | None = None
    cache_dir: _AbsolutePath | None = None
    cache_bytes: _Natural = 4 << 30
    http_token: Annotated[str, _matches("visible ASCII characters without spaces", "[!-~]+")] | None = (
        dataclasses.field(default=None, repr=False)
    )

    def at_port(self, port: int, rank: int | None = None) -> Self:
        """Return these settings with a replica id that stays the same at this port (and for this engine's
        rank), unless given.
        """
        if self.replica_id != _default_replica_id():
            return self
        place = f"{self.replica_id}-{port}" + ("" if rank is None else f"-{rank}")
        return dataclasses.replace(self, replica_id=place)

    def check_no_max_lag(self) -> None:
        """Check that no server whose commits end no request was given a maximum lag (ConfigError)."""
        _require(
            self.max_lag is None,
            "DELTASYNC_MAX_LAG is set, and this server ends no request at a commit: leave it out, or follow the "
            "channel with vLLM.",
        )

    def with_called_channel(self, channel: str | None) -> Self:
        """Return these settings with the channel that a remote caller names; None for the configured one.

        Raises ConfigError if the channel is neither the configured one nor below one of `allowed_channels`;
        or its URL has options, with which a caller could choose a server (`?endpoint=`).
        """
        if channel is None or channel == self.channel:
            return self
        _require(
            isinstance(channel, str) and _is_plain(channel),
            "A caller's channel URL must not contain '?', '#', '%' or '..'. Only the server's settings may "
            "have options.",
        )
        allowed = any(
            channel == prefix or channel.startswith(f"{prefix}/")
            for prefix in _prefixes(self.allowed_channels)
        )
        configured = (
            "follows no channel" if self.channel is None else "follows the channel of its DELTASYNC_CHANNEL"
        )
        _require(
            allowed,
            f"This server {configured}. Callers may not name {channel!r}: it is not in "
            "DELTASYNC_ALLOWED_CHANNELS.",
        )
        return dataclasses.replace(self, channel=channel)
