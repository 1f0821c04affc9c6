"""Object keys of a channel. The only place that formats or parses a key."""

from __future__ import annotations

import re

from deltasync.stores.base import check_key as check_key

CHANNEL = "channel.json"
HEAD = "head.json"
MANIFESTS = "manifests/"
FOLDS = "folds/"
DATA = ("anchors/", "deltas/", FOLDS)
"""Where the objects lie that documents refer to."""
FORGOTTEN = "forgotten/"
CLOCK = f"{FORGOTTEN}clock"
REPLICAS = "replicas/"

_MANIFEST = re.compile(r"manifests/([0-9]{10,19})\.json")
_OF_VERSION = re.compile(r"(?:anchors|deltas)/([0-9]{10,19})(?:\.[0-9]+)?/.+")
_OF_FOLD = re.compile(r"folds/([0-9]{10,19})-([0-9]{10,19})(?:\.[0-9]+)?/.+")
_FOLD = re.compile(r"folds/([0-9]{10,19})-([0-9]{10,19})(?:\.[0-9]+)?/fold\.json")


def manifest(version: int) -> str:
    """Key of the manifest of `version`."""
    return f"manifests/{version:010d}.json"


def manifest_version(key: str) -> int | None:
    """Version of a manifest key, or None for any other key."""
    match = _MANIFEST.fullmatch(key)
    return int(match[1]) if match else None


def anchor_dir(version: int, attempt: int = 0) -> str:
    """Folder of an anchor. `attempt` > 0 when a dead publisher left part of an unfinished one behind."""
    return f"anchors/{version:010d}" + (f".{attempt}" if attempt else "")


def delta_dir(version: int, attempt: int = 0) -> str:
    """Folder of a delta's payload; `attempt` as in `anchor_dir`."""
    return f"deltas/{version:010d}" + (f".{attempt}" if attempt else "")


def fold_dir(base_version: int, version: int, attempt: int = 0) -> str:
    """Folder of a fold; `attempt` as in `anchor_dir`."""
    return f"folds/{base_version:010d}-{version:010d}" + (f".{attempt}" if attempt else "")


def fold_document(directory: str) -> str:
    """Key of the document of the fold in `directory`, whose existence makes the fold one."""
    return f"{directory}/fold.json"


def fold_span(key: str) -> tuple[int, int] | None:
    """Base version and version of the key of a fold's document, or None for any other key."""
    match = _FOLD.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None


def data_versions(key: str) -> tuple[int, ...]:
    """The version that a data object was written for, two in a fold (base version, version); empty for any other key."""
    match = _OF_VERSION.fullmatch(key) or _OF_FOLD.fullmatch(key)
    return tuple(int(group) for group in match.groups()) if match else ()


def forgotten(name: str) -> str:
    """Key of a list of forgotten versions."""
    return check_key(f"{FORGOTTEN}{name}.json")


def delta_part(part: int, part_count: int) -> str:
    """File name of one payload of a delta; parts count from 1."""
    return f"part-{part:05d}-of-{part_count:05d}.safetensors"


def anchor_shard(shard: int, shard_count: int) -> str:
    """File name of one weight file of an anchor, as transformers names them; shards count from 1."""
    if shard_count == 1:
        return "model.safetensors"
    return f"model-{shard:05d}-of-{shard_count:05d}.safetensors"


def replica(replica_id: str) -> str:
    """Key of a replica's heartbeat."""
    return check_key(f"{REPLICAS}{replica_id}.json")
