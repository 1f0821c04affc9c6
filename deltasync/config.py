"""Settings, each a frozen keyword-only dataclass, and the only reader of `DELTASYNC_*`.

An explicit argument (anything but None) beats the environment, which beats the default.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from deltasync.errors import ConfigError

CODECS = ("packed", "context", "raw")
DTYPES = ("bfloat16", "float16", "float32", "fp8", "keep")
PLACEMENTS = ("auto", "device", "host")
COMPRESSIONS = ("none", "zstd")
KV_CACHE = ("keep", "recompute")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    """Reads each field `x` from `DELTASYNC_X` where no argument was given."""

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
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if hint is bool:
        _require(text in ("0", "1"), f"{variable} must be 0 or 1, not {text!r}.")
        return text == "1"
    try:
        return hint(text)
    except ValueError:
        raise ConfigError(f"{variable}={text!r} is not a valid {hint.__name__}.") from None


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
    max_age_s: float | None = None

    def __post_init__(self) -> None:
        _require(self.max_age_s is None or self.max_age_s > 0, "max_age_s must be positive.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublisherSettings(_Settings):
    """How a publisher writes.

    Attributes:
        codec: Encoding of deltas, one of `CODECS`.
        anchor_every: An anchor accompanies at least every N-th version; by default every 100th, but not after one that is
            a reference. It also does when replaying the chain since the last anchor would cost more bytes than an anchor.
        dtype: Served dtype: floating tensors are cast to it (round to nearest even); `fp8` quantizes matrices by blocks, see
            `quantize`; `keep` publishes as given.
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

    codec: str = "packed"
    anchor_every: int | None = None
    dtype: str = "bfloat16"
    shadow_placement: str = "auto"
    shard_bytes: int = 1 << 30
    anchor_compression: str = "none"
    retries: int = 6
    retry_delay_s: float = 0.25
    settle_s: float = 30.0
    peer_timeout_s: float = 600.0
    signing_key: str | Path | None = None
    trusted_keys: str | Path | None = None

    def __post_init__(self) -> None:
        _require(self.codec in CODECS, f"codec must be one of {', '.join(CODECS)}, not {self.codec!r}.")
        _require(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}.")
        _require(
            self.shadow_placement in PLACEMENTS,
            f"shadow_placement must be one of {', '.join(PLACEMENTS)}, not {self.shadow_placement!r}.",
        )
        _require(self.anchor_every is None or self.anchor_every >= 1, "anchor_every must be at least 1.")
        _require(self.shard_bytes >= 1, "shard_bytes must be at least 1.")
        _require(
            self.anchor_compression in COMPRESSIONS,
            f"anchor_compression must be one of {', '.join(COMPRESSIONS)}, not {self.anchor_compression!r}.",
        )
        _require(self.retries >= 0, "retries must not be negative.")
        _require(self.retry_delay_s >= 0, "retry_delay_s must not be negative.")
        _require(self.peer_timeout_s > 0, "peer_timeout_s must be positive.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention(_Settings):
    """How a publisher looks after its channel in the background. By default it does nothing: all versions stay.

    Attributes:
        fold_every: Write a fold over every so many versions, for replicas that catch up; 0 for none. Costs memory for the
            changes of so many versions, and the time to encode them with the last one.
        keep_last: Forget all but the newest so many versions and what leads to them; None to keep all.
        keep_anchors: Also keep the newest so many versions that have full weights.
        prune_grace_s: Delete the bytes of what was forgotten so many seconds ago; more than the slowest replica takes to
            load full weights.
    """

    fold_every: int = 0
    keep_last: int | None = None
    keep_anchors: int | None = None
    prune_grace_s: float = 3600.0

    def __post_init__(self) -> None:
        _require(self.fold_every == 0 or self.fold_every >= 2, "fold_every must be 0, or at least 2 versions.")
        _require(self.keep_last is None or self.keep_last >= 1, "keep_last must be at least 1.")
        _require(self.keep_anchors is None or self.keep_anchors >= 1, "keep_anchors must be at least 1.")
        _require(self.prune_grace_s >= 0, "prune_grace_s must not be negative.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerSettings(_Settings):
    """How a trainer keeps step with its fleet.

    Attributes:
        max_behind: Versions that the fleet may serve behind the newest one while training goes on; 0 to wait for each. None
            leaves it to the kind of trainer.
    """

    max_behind: int | None = None

    def __post_init__(self) -> None:
        _require(self.max_behind is None or self.max_behind >= 0, "max_behind must not be negative.")


def _default_replica_id() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[-64:].lstrip("-") or "replica"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaSettings(ReaderSettings):
    """How a replica follows; also `ReaderSettings`.

    Attributes:
        channel: URL of the channel; None when deltasync is not configured.
        adapter: Name under which vLLM serves the adapter that the channel holds; None if it holds the served model.
        allowed_channels: Prefixes, with commas between them, of the channels that callers of vLLM's weight-transfer routes
            may name instead of `channel`, such as `s3://bucket/runs`; None for no other channel.
        replica_id: Name of the heartbeat object: the host's by default, for a server with its port (`at_port`).
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
    adapter: str | None = None
    allowed_channels: str | None = None
    replica_id: str = dataclasses.field(default_factory=_default_replica_id)
    poll_interval_s: float = 1.0
    heartbeat_interval_s: float = 10.0
    audit_interval_s: float = 3600.0
    ready_behind: int = 8
    wait_ready: bool = False
    kv_cache: str = "keep"
    cache_dir: str | None = None
    cache_bytes: int = 4 << 30
    digest_route: bool = False
    http_token: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.kv_cache in KV_CACHE, f"kv_cache must be one of {', '.join(KV_CACHE)}, not {self.kv_cache!r}.")
        _require(
            self.cache_dir is None or os.path.isabs(self.cache_dir),
            f"cache_dir must be an absolute path, not {self.cache_dir!r}.",
        )
        _require(self.cache_bytes >= 0, "cache_bytes must not be negative.")
        _require(self.poll_interval_s > 0, "poll_interval_s must be positive.")
        _require(self.heartbeat_interval_s > 0, "heartbeat_interval_s must be positive.")
        _require(self.audit_interval_s >= 0, "audit_interval_s must not be negative.")
        _require(self.ready_behind >= 0, "ready_behind must not be negative.")
        _require(
            re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.replica_id) is not None,
            f"replica_id must be 1 to 100 letters, digits, '.', '_' or '-', not {self.replica_id!r}.",
        )
        _require(
            self.adapter is None or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.adapter) is not None,
            f"adapter must be 1 to 100 letters, digits, '.', '_' or '-', not {self.adapter!r}.",
        )
        _require(
            self.http_token is None or re.fullmatch(r"[!-~]+", self.http_token) is not None,
            "http_token must be visible ASCII characters without spaces; this one (not shown) is not.",
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
        """These settings with a replica's name that is the same when its server starts again, unless a name was given.

        Args:
            port: That the server listens on.
            rank: Of several engines that share the work of one port.
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
