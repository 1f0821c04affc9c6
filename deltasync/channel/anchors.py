"""Anchors: full weights as an ordinary checkpoint directory that `from_pretrained` and `vllm serve` load.

The metadata of a weight file hold the fingerprints of its tensors.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from deltasync import limits
from deltasync.channel import keys
from deltasync.channel.documents import Fingerprint
from deltasync.codec.base import entries, layout, read_metadata
from deltasync.errors import UNREADABLE_JSON, ConfigError, CorruptDataError
from deltasync.stores.base import is_key
from deltasync.tensors import SAFETENSORS_DTYPES, TensorSpec, fingerprint, weight_bytes
from deltasync.tensors.bits import bits_of, spec_of

logger = logging.getLogger(__name__)

_FINGERPRINTS = "deltasync.fingerprints"
INDEX = "model.safetensors.index.json"
Take = Callable[[str, np.ndarray], int]
"""Writes a tensor's unsigned bit patterns into an array of shape N, and returns their fingerprint."""
Room = Callable[[str, int], np.ndarray]  # returns writable bytes for a file, by its name and size
TEXTS = (".json", ".jinja", ".txt", ".model", ".py", ".tiktoken")
"""Suffixes of config, tokenizer, templates and code."""
_CONFIGS = ("config.json", "tokenizer_config.json", "adapter_config.json")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".pkl", ".pickle")
"""Suffixes of files that hold weights. Some of these formats run code when they are loaded."""


def read_model_files(directory: Path) -> dict[str, bytes]:
    """Read the files of a checkpoint directory that are not weights, by name: config, tokenizer, templates,
    code.

    Subfolders of a checkpoint, such as `additional_chat_templates`, contribute their `TEXTS`, unless they are
    checkpoints of their own.

    Raises:
        ConfigError: it is no directory, a part of it cannot be read, or it has more than an anchor may have.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory with a config and a tokenizer.")
    found, size = dict[str, bytes](), 0
    try:
        for path in _small_files(directory):
            name, size = path.relative_to(directory).as_posix(), size + path.stat().st_size
            if len(found) == limits.COMPANION_FILES or size > limits.COMPANION_BYTES:
                raise ConfigError(
                    f"{directory} holds more than {limits.COMPANION_FILES:,} files, or "
                    f"{limits.COMPANION_BYTES >> 20} MiB, "
                    "that are not weights. Name a directory with nothing but config, tokenizer and templates."
                )
            if path.parent == directory or is_key(name):
                found[name] = path.read_bytes()
            else:
                logger.warning(
                    "%s is left out of the channel's checkpoints: no object can have this name.", path
                )
    except OSError as error:
        raise ConfigError(f"{error.filename or directory} cannot be read: {error.strerror}.") from error
    return found


def _small_files(directory: Path, *, is_top: bool = True) -> Iterator[Path]:
    """Yield the files of a directory that are not weights, and the texts of its subfolders. Links to folders
    are skipped.
    """
    paths = sorted(
        path for path in directory.iterdir() if not path.name.startswith(".") and path.name != "__pycache__"
    )
    files = [path for path in paths if path.is_file() and path.suffix not in WEIGHTS and path.name != INDEX]
    names = {path.name for path in files}
    if is_top and names.isdisjoint(_CONFIGS):
        paths = []
    if not is_top and ("trainer_state.json" in names or {"config.json", "tokenizer_config.json"} <= names):
        return
    yield from (path for path in files if is_top or path.suffix in TEXTS)
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            yield from _small_files(path, is_top=False)


def weight_files(
    tensors: Mapping[str, torch.Tensor],
    fingerprints: Mapping[str, int],
    shard_bytes: int = limits.SHARD_BYTES,
) -> Iterator[tuple[str, bytes | memoryview]]:
    """`taken_files` of contiguous tensors on the host, whose fingerprints are known."""
    specs = {name: spec_of(name, tensor) for name, tensor in tensors.items()}

    def take(name: str, out_N: np.ndarray) -> int:
        np.copyto(out_N, bits_of(tensors[name]))
        return fingerprints[name]

    return taken_files(specs, take, shard_bytes)


def taken_files(
    specs: Mapping[str, TensorSpec],
    take: Take,
    shard_bytes: int,
    room: Room | None = None,
) -> Iterator[tuple[str, bytes | memoryview]]:
    """Make weight files one after the other, as (file name, bytes), then the index if there are several.

    `take` is called once for each tensor, in the order of `specs`, when the tensor's file is made. A file has
    at most `shard_bytes`, unless a single tensor is larger. They are made in `room`, by default in new
    memory.
    """
    files = shards(specs, shard_bytes)
    for file_name, names in files.items():
        held = [specs[name] for name in names]
        yield file_name, _plain(held, take, file_name, room or _memory)
    if len(files) > 1:
        weight_map = {name: file_name for file_name, names in files.items() for name in names}
        index = {"metadata": {"total_size": weight_bytes(specs.values())}, "weight_map": weight_map}
        yield INDEX, json.dumps(index, indent=2).encode()


def _memory(name: str, size: int) -> np.ndarray:
    return torch.empty(size, dtype=torch.uint8, device="cpu").numpy()


def _plain(specs: Sequence[TensorSpec], take: Take, file_name: str, room: Room) -> memoryview:
    """A file whose tensors are written straight to their places in it, without another copy."""
    head, order = layout(specs, _metadata({spec.name: 0 for spec in specs}))
    file_B = room(file_name, len(head) + weight_bytes(specs))
    places, end = dict[str, np.ndarray](), len(head)
    for spec in order:
        start, end = end, end + spec.nbytes
        places[spec.name] = file_B[start:end].view(spec.bits_dtype)
    found = {spec.name: take(spec.name, places[spec.name]) for spec in specs}
    head, _ = layout(specs, _metadata(found))  # as long as before
    file_B[: len(head)] = np.frombuffer(head, np.uint8)
    return file_B.data


def _metadata(digests: Mapping[str, int]) -> dict[str, str]:
    text = json.dumps(
        {name: fingerprint.to_hex(digest) for name, digest in digests.items()}, separators=(",", ":")
    )
    return {"format": "pt", _FINGERPRINTS: text}


def shards(specs: Mapping[str, TensorSpec], shard_bytes: int) -> dict[str, list[str]]:
    """File name -> names of its tensors, in order, for weight files as `taken_files` makes them."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += spec.nbytes
    return {keys.anchor_shard(number, len(shards)): names for number, names in enumerate(shards, start=1)}


def read_weights(
    data: bytes | memoryview, specs: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, np.ndarray, int]]:
    """Read a weight file: name, unsigned bit patterns of shape N, fingerprint (not compared here).

    Bits are a read-only view of `data` where that is aligned. Otherwise one tensor at a time is in memory.
    """
    digests, file_B = fingerprints(data), np.frombuffer(data, np.uint8)
    for spec, first, last in contents(data, len(data), specs):
        if spec.name not in digests:
            raise CorruptDataError(f"The anchor's weight file has no fingerprint of {spec.name!r}.")
        bits_N = np.require(file_B[first:last].view(spec.bits_dtype), requirements="A")
        yield spec.name, bits_N, digests[spec.name]


def contents(
    head: bytes | memoryview, size: int, specs: Mapping[str, TensorSpec]
) -> Iterator[tuple[TensorSpec, int, int]]:
    """Check the tensors of a weight file of `size` bytes, from its first bytes with the whole header.

    Yields each tensor's spec, its first byte, and the byte behind its last one.
    Raises CorruptDataError if the header is damaged, or a tensor is not as in `specs`.
    """
    for name, (dtype, shape, first, last) in entries(head, size).items():
        spec = specs.get(name)
        if spec is None:
            raise CorruptDataError(f"The anchor's weight file holds {name!r}, which the channel lacks.")
        if (dtype, shape) != (SAFETENSORS_DTYPES[spec.dtype], spec.shape):
            raise CorruptDataError(
                f"The anchor's weight file holds {name} {dtype}{list(shape)} instead of {spec}."
            )
        yield spec, first, last


def fingerprints(data: bytes | memoryview) -> dict[str, int]:
    """The fingerprints in the metadata of a weight file."""
    try:
        found = msgspec.json.decode(
            read_metadata(data).get(_FINGERPRINTS, "null"), type=dict[str, Fingerprint]
        )
    except UNREADABLE_JSON as error:
        raise CorruptDataError(f"The anchor's weight file has no table of fingerprints: {error}.") from error
    return {name: int(digest, 16) for name, digest in found.items()}
