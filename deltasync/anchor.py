"""Anchors: the full weights as an ordinary checkpoint directory that `from_pretrained` and `vllm serve` load.

The safetensors metadata of each weight file holds `format: pt`, as transformers writes it, and `deltasync.fingerprints`:
JSON of tensor name to the fingerprint of its bits, so that a reader can tell which tensor differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save as safetensors_save

from deltasync import fingerprint, layout
from deltasync.codec.base import read_metadata
from deltasync.errors import ConfigError, CorruptDataError

INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".pkl", ".pickle")
"""Endings of files that hold weights, some of which run code when they are loaded."""


def companion_files(directory: Path) -> dict[str, bytes]:
    """What makes weights a checkpoint: config, tokenizer, templates; every small top-level file that is no weights.

    Raises:
        ConfigError: no such directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory with a config and a tokenizer.")
    files = (path for path in sorted(directory.iterdir()) if path.is_file() and not path.name.startswith("."))
    return {path.name: path.read_bytes() for path in files if path.suffix not in WEIGHTS and path.name != INDEX}


def weight_files(
    tensors: Mapping[str, torch.Tensor], fingerprints: Mapping[str, int], shard_bytes: int
) -> Iterator[tuple[str, bytes]]:
    """Weight files one after the other, (file name, bytes), then the index if there is more than one.

    Args:
        tensors: Contiguous host tensors by name; copied into the bytes of the shard that is being made.
        fingerprints: Of each tensor.
        shard_bytes: Largest file, unless a single tensor is larger.
    """
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    files = shards(sizes, shard_bytes)
    for file_name, names in files.items():
        yield file_name, safetensors_save({name: tensors[name] for name in names}, metadata(fingerprints, names))
    if len(files) > 1:
        yield INDEX, index(sizes, files)


def shards(sizes: Mapping[str, int], shard_bytes: int) -> dict[str, list[str]]:
    """Names of the tensors of each weight file, in order.

    Args:
        sizes: Bytes of each tensor.
        shard_bytes: See `weight_files`.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return {layout.anchor_shard(number, len(shards)): names for number, names in enumerate(shards, start=1)}


def metadata(fingerprints: Mapping[str, int], names: Sequence[str]) -> dict[str, str]:
    """The metadata of a weight file with these tensors."""
    digests = {name: fingerprint.to_hex(fingerprints[name]) for name in names}
    return {"format": "pt", "deltasync.fingerprints": json.dumps(digests, separators=(",", ":"))}


def index(sizes: Mapping[str, int], files: Mapping[str, Sequence[str]]) -> bytes:
    """The index of several weight files."""
    weight_map = {name: file_name for file_name, names in files.items() for name in names}
    return json.dumps({"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}, indent=2).encode()


def fingerprints(data: bytes) -> dict[str, int]:
    """The fingerprints in the metadata of a weight file.

    Raises:
        CorruptDataError: there are none.
    """
    try:
        digests = json.loads(read_metadata(data)["deltasync.fingerprints"])
        return {name: int(digest, 16) for name, digest in digests.items()}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptDataError(f"The anchor's weight file names no fingerprints: {error!r}.") from error
