"""Anchors: the full weights as an ordinary checkpoint directory that `from_pretrained` and `vllm serve` load.

The metadata of each weight file hold the fingerprint of each tensor. Compressed files hold planes (`codec.dense`) of tensors
that shrink, and are no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltasync.channel import keys
from deltasync.channel.documents import COMPRESSED
from deltasync.codec import dense
from deltasync.codec.base import FORMAT, body, load_tensors, read_metadata
from deltasync.errors import ConfigError, CorruptDataError
from deltasync.tensors import TensorSpec, fingerprint
from deltasync.tensors.bits import bits_of

_FINGERPRINTS, _PLANES = "deltasync.fingerprints", "deltasync.planes"
INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".pkl", ".pickle")
"""Endings of files that hold weights, some of which run code when they are loaded."""


def companion_files(directory: Path) -> dict[str, bytes]:
    """Every small top-level file that is no weights, by name: config, tokenizer, templates.

    Raises:
        ConfigError: no such directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory with a config and a tokenizer.")
    files = (path for path in sorted(directory.iterdir()) if path.is_file() and not path.name.startswith("."))
    return {path.name: path.read_bytes() for path in files if path.suffix not in WEIGHTS and path.name != INDEX}


def weight_files(
    tensors: Mapping[str, torch.Tensor], fingerprints: Mapping[str, int], shard_bytes: int, compression: str | None = None
) -> Iterator[tuple[str, bytes]]:
    """As `taken_files`, of contiguous host tensors."""
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    return taken_files(sizes, tensors.__getitem__, fingerprints, shard_bytes, compression)


def taken_files(
    sizes: Mapping[str, int],
    take: Callable[[str], torch.Tensor],
    fingerprints: Mapping[str, int],
    shard_bytes: int,
    compression: str | None = None,
) -> Iterator[tuple[str, bytes]]:
    """Weight files one after the other, (file name, bytes), then the index if there is more than one.

    Args:
        sizes: Bytes of each tensor.
        take: Gives a tensor, contiguous and on the host; called once for each, when its file is made.
        fingerprints: Fingerprint of each tensor.
        shard_bytes: Largest file before it is compressed, unless a single tensor is larger.
        compression: `COMPRESSED`, or None for files that transformers and vLLM load.
    """
    if compression not in (None, COMPRESSED):
        raise ConfigError(f"Anchors are compressed by {COMPRESSED!r} or not at all, not by {compression!r}.")
    files = shards(sizes, shard_bytes)
    for file_name, names in files.items():
        entries, planes = dict[str, torch.Tensor](), dict[str, list[int]]()
        for name in names:
            entries[name] = take(name)
            if compression and (found := dense.compress(bits_of(entries[name]))) is not None:
                planes[name], entries[name] = found
        digests = {name: fingerprint.to_hex(fingerprints[name]) for name in names}
        metadata = {"format": "pt", _FINGERPRINTS: json.dumps(digests, separators=(",", ":"))}
        if compression:
            metadata |= {"format": FORMAT, _PLANES: json.dumps(planes, separators=(",", ":"))}
        data = b"".join(body(entries, metadata))
        entries.clear()
        yield file_name, data
        del data  # before the next one is made
    if len(files) > 1:
        weight_map = {name: file_name for file_name, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        yield INDEX, json.dumps(index, indent=2).encode()


def shards(sizes: Mapping[str, int], shard_bytes: int) -> dict[str, list[str]]:
    """Names of the tensors of each weight file of up to `shard_bytes`, in order."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return {keys.anchor_shard(number, len(shards)): names for number, names in enumerate(shards, start=1)}


def read_weights(data: bytes, specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, np.ndarray, int]]:
    """Tensors of a weight file, compressed or not: name, unsigned bit patterns of shape N, fingerprint (not yet compared).

    Besides the file's own tensors no more than one is in memory, and none that `specs` does not have is decompressed.

    Raises:
        CorruptDataError: it cannot be read, or holds anything else.
    """
    digests, planes, tensors = fingerprints(data), _table(data, _PLANES, "{}"), load_tensors(data)
    if unknown := planes.keys() - tensors.keys():
        raise CorruptDataError(f"The anchor's weight file names planes of {unknown.pop()!r}, which it does not hold.")
    for name in list(tensors):
        spec, tensor = specs.get(name), tensors.pop(name)
        if spec is None or name not in digests:
            raise CorruptDataError(f"The anchor's weight file holds {name!r}, which the channel or its fingerprints lack.")
        if name in planes:
            yield name, dense.decompress(tensor, planes[name], spec), digests[name]
        # Not `spec_of`, for which a dtype that no channel carries is the caller's mistake.
        elif (found := (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))) == (spec.dtype, spec.shape):
            yield name, bits_of(tensor), digests[name]
        else:
            raise CorruptDataError(f"The anchor's weight file holds {name} {found[0]}{list(found[1])} instead of {spec}.")


def fingerprints(data: bytes) -> dict[str, int]:
    """The fingerprints in the metadata of a weight file."""
    try:
        return {name: int(digest, 16) for name, digest in _table(data, _FINGERPRINTS).items()}
    except (ValueError, TypeError) as error:
        raise CorruptDataError(f"The anchor's weight file names no fingerprints: {error!r}.") from error


def _table(data: bytes, key: str, default: str = "null") -> dict[str, Any]:
    """A JSON object in the metadata of a weight file."""
    try:
        table = json.loads(read_metadata(data).get(key, default))
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"The anchor's weight file has no table {key!r}: {error!r}.") from error
    if not isinstance(table, dict):
        raise CorruptDataError(f"The anchor's weight file has no table {key!r}.")
    return table
