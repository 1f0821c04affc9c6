"""The layout `weight_v` of slime, miles, Stitch and ModelExpress: each version is a directory of whole or
changed tensors.

    weight_v000007/model.safetensors.index.json          or v7/...
    weight_v000007/model-00000-of-00002.safetensors

A full version is an ordinary checkpoint. The index of a delta names its encoding, and each tensor that
changed is an entry of dtype U8, one zstd frame: its bytes, XORed with those of the version before (`xor`), or
the positions of the bytes that changed and what these became (`overwrite`). The metadata of a weight file
have the checksum of each tensor's new bytes. Sources: `docs/en/advanced/delta-weight-sync.md` of slime;
`modelexpress_rl` 0.7.0 (canonical_delta).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from deltasync.channel import anchors
from deltasync.channel.anchors import INDEX
from deltasync.codec.base import entries, read_metadata
from deltasync.errors import (
    UNREADABLE_JSON,
    ConfigError,
    CorruptDataError,
    ModelMismatchError,
    NotPublishedError,
)
from deltasync.opening.ranges import RangedFile
from deltasync.stores import ObjectInfo, Store
from deltasync.tensors import SAFETENSORS_DTYPES, TensorSpec
from deltasync.tensors.bits import bits_of, spec_of, tensor_of

ENCODINGS = ("xor", "overwrite")
CHECKSUMS = ("adler32", "xxh3-128", "blake3")
_WHOLE = "model.safetensors"
_INDEX_BYTES = _SMALL_BYTES = 1 << 28
_FOLDER = re.compile(r"(?P<style>weight_v(?=[0-9]{6})|v(?=0|[1-9]))(?P<number>[0-9]{1,12})")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*\.safetensors")
_WINDOW_BYTES = 1 << 27  # of zstd
_NAMES = {entry: name for name, entry in SAFETENSORS_DTYPES.items()}


class _Metadata(msgspec.Struct):
    version: str | int | None = None
    base_version: str | int | None = None
    delta_encoding: str | None = None
    compression_format: str | None = None
    checksum_format: str | None = None
    deltasync_sha256: str | None = None  # of the record, where `Export` wrote it


class _VersionIndex(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


_Header = dict[str, tuple[str, tuple[int, ...], int, int]]  # as `entries` returns it
Weights = dict[str, torch.Tensor]
"""Tensors of a version by name."""


class VersionDir(NamedTuple):
    """A version whose files are all there.

    Attributes:
        store: The store that has its directory.
        number: Its number, from the name of its directory.
        base: The number of the version that its delta applies to; None if it is a full version.
        metadata: The metadata of its index.
        files: Its weight files.
        others: Config, tokenizer and so on, by name, perhaps in subfolders.
        has_index: Whether it has an index, as all but a single whole file have.
    """

    store: Store
    number: int
    base: int | None
    metadata: _Metadata
    files: list[ObjectInfo]
    others: dict[str, ObjectInfo]
    has_index: bool = True

    def full(self) -> Weights:
        """Read a full version.

        Raises:
            CorruptDataError: a file is malformed, or a tensor has another checksum than its file says.
        """
        weights, algorithm = Weights(), self.metadata.checksum_format
        for info, name, entry, data, wanted in self._entries():
            if entry[0] not in _NAMES:
                raise ModelMismatchError(
                    f"{info.key} holds {name} as {entry[0]}, which deltasync cannot publish."
                )
            data_B = np.frombuffer(data, np.uint8).copy()
            weights[name] = _tensor(data_B, TensorSpec(name, _NAMES[entry[0]], entry[1]))
            if algorithm is not None and wanted is not None:
                self._check(info, name, algorithm, data_B, wanted)
        return weights

    def small_files(self) -> dict[str, bytes]:
        """Read the files that hold no weights, by name: its config, its tokenizer and so on."""
        return {name: self.store.read(info.key, _SMALL_BYTES, info) for name, info in self.others.items()}

    def delta(self, weights: Weights) -> Weights:
        """Return the tensors that a delta changes, as it leaves them. `weights` are those of its base, and
        stay as they are.

        Raises:
            CorruptDataError: a file is malformed, or the result has another checksum than the file says.
            ModelMismatchError: it names a tensor that the model lacks.
        """
        new = Weights()
        for info, name, entry, data, wanted in self._entries():
            if name not in weights:
                raise ModelMismatchError(
                    f"{info.key} changes {name}, which the version before does not have."
                )
            if entry[0] != "U8" or name in new or wanted is None or self.metadata.checksum_format is None:
                raise CorruptDataError(f"{info.key} does not hold {name} once, as bytes with a checksum.")
            try:
                new_B = _DECODERS[self.metadata.delta_encoding or ""](data, bytes_of(weights[name]))
            except ValueError as error:
                raise CorruptDataError(f"{info.key} holds no delta of {name}: {error}.") from error
            self._check(info, name, self.metadata.checksum_format, new_B, wanted)
            new[name] = _tensor(new_B, spec_of(name, weights[name]))
        return new

    def _entries(
        self,
    ) -> Iterator[tuple[ObjectInfo, str, tuple[str, tuple[int, ...]], memoryview, str | None]]:
        for info in self.files:
            data = memoryview(self.store.read(info.key, info.bytes, info))
            said = dict[str, str]()
            # full versions may lack metadata; `entries` says what else is wrong
            with contextlib.suppress(CorruptDataError):
                said = read_metadata(data)
            for name, (dtype, shape, first, last) in entries(data, len(data)).items():
                yield info, name, (dtype, shape), data[first:last], said.get(name)

    def _check(self, info: ObjectInfo, name: str, algorithm: str, data_B: np.ndarray, wanted: str) -> None:
        found = checksum(algorithm, data_B)
        # fireworks-delta-compression writes the number in decimal
        if found != wanted and not (algorithm == "adler32" and str(int(found, 16)) == wanted):
            raise CorruptDataError(
                f"{self.store.url}/{info.key} leads to other bits of {name} than its checksum is of."
            )


class FoundVersions(NamedTuple):
    """The version directories of a store.

    Attributes:
        ready: The versions whose files are all there, ascending.
        problems: Why the others cannot be read, by number: NotPublishedError while one is being written, or
            CorruptDataError.
    """

    ready: list[VersionDir]
    problems: dict[int, NotPublishedError | CorruptDataError]


def find(store: Store, after: int) -> FoundVersions:
    """Find the versions with a higher number than `after`.

    Raises:
        ConfigError: two directories have the same number.
    """
    folders: dict[int, tuple[str, dict[str, ObjectInfo]]] = {}
    for info in store.list(""):
        folder, _, file = info.key.partition("/")
        match = _FOLDER.fullmatch(folder)
        if match is None or (number := int(match["number"])) <= after:
            continue
        name, files = folders.setdefault(number, (folder, {}))
        if name != folder:
            raise ConfigError(f"{store.url} holds both {name} and {folder}. Move one of them away.")
        files[file] = info
    found = FoundVersions([], {})
    for number, (folder, files) in sorted(folders.items()):
        try:
            found.ready.append(_version(store, number, folder, files))
        except (NotPublishedError, CorruptDataError) as error:
            found.problems[number] = error
    return found


def _version(store: Store, number: int, folder: str, files: Mapping[str, ObjectInfo]) -> VersionDir:
    """Return a version.

    Raises:
        NotPublishedError: it is being written, or its writer has died.
        CorruptDataError: its index is malformed, or says something else than its directory or its files.
    """
    place = f"{store.url}/{folder}"
    others = {
        name: info for name, info in files.items() if name != INDEX and not name.endswith(anchors.WEIGHTS)
    }
    weights = {
        name: info for name, info in files.items() if name.endswith(".safetensors") and "/" not in name
    }
    if (info := files.get(INDEX)) is None:
        if weights.keys() == {_WHOLE} and _is_full(_header(store, weights[_WHOLE])):
            return VersionDir(store, number, None, _Metadata(), [*weights.values()], others, has_index=False)
        size = sum(info.bytes for info in files.values())
        raise NotPublishedError(
            f"{place} is unfinished: it has {len(files)} files of {size:,} bytes, and no {INDEX}."
        )
    try:
        index = msgspec.json.decode(store.read(info.key, _INDEX_BYTES, info), type=_VersionIndex)
    except UNREADABLE_JSON as error:
        raise CorruptDataError(f"{place}/{INDEX} is not the index of a version: {error}.") from error
    names, metadata = sorted(set(index.weight_map.values())), index.metadata
    if odd := [name for name in names if not _FILE.fullmatch(name)]:
        raise CorruptDataError(f"{place}/{INDEX} names {odd[0]!r}, which is not a weight file beside it.")
    if missing := [name for name in names if name not in weights]:
        raise NotPublishedError(f"{place} is unfinished: its index names {missing[0]}, which is not there.")
    headers = {name: _header(store, info) for name, info in weights.items()}
    _compare(place, index.weight_map, headers)
    base = None
    if metadata.delta_encoding is not None:
        if metadata.delta_encoding not in ENCODINGS or metadata.compression_format != "zstd":
            raise CorruptDataError(
                f"{place} is encoded by {metadata.delta_encoding!r} and {metadata.compression_format!r}; "
                "deltasync reads "
                f"{' and '.join(ENCODINGS)} with zstd."
            )
        said, base = _number(metadata.version), _number(metadata.base_version)
        if said != number or base is None or base >= number:
            raise CorruptDataError(f"{place} says that it leads from version {base} to {said}.")
    elif not _is_full({name: entry for header in headers.values() for name, entry in header.items()}):
        raise CorruptDataError(f"{place} holds no whole tensors, and its index names no encoding of a delta.")
    return VersionDir(store, number, base, metadata, [files[name] for name in names], others)


def _compare(place: str, weight_map: Mapping[str, str], headers: Mapping[str, _Header]) -> None:
    """Raise CorruptDataError unless each tensor of the index is in the file that it names, and each file's
    are in it.
    """
    for file, header in sorted(headers.items()):
        for name in header:
            if (named := weight_map.get(name)) is None:
                raise CorruptDataError(f"{place}/{file} holds {name}, which the index does not name.")
            if named != file:
                raise CorruptDataError(f"{place}/{file} holds {name}, which the index places in {named}.")
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise CorruptDataError(f"{place}/{INDEX} places {name} in {file}, which does not hold it.")


def _header(store: Store, info: ObjectInfo) -> _Header:
    """Read the header of a weight file. Raises NotPublishedError while the file is shorter than its header
    says.
    """
    try:
        return entries(
            RangedFile(info.bytes, functools.partial(store.read_range, info.key)).header(), info.bytes
        )
    except CorruptDataError as error:
        raise NotPublishedError(
            f"{store.url}/{info.key} is unfinished: its {info.bytes:,} bytes are not what its header says."
        ) from error


def _is_full(header: _Header) -> bool:
    """Whether these are whole tensors. A delta has an entry of bytes for each, or none at all."""
    return not all(dtype == "U8" and len(shape) == 1 for dtype, shape, *_ in header.values())


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a view of the bytes of a tensor: uint8 of its number of bytes."""
    return bits_of(tensor).view(np.uint8)


def _tensor(data_B: np.ndarray, spec: TensorSpec) -> torch.Tensor:
    return tensor_of(data_B.view(spec.bits_dtype), spec)


def _number(text: str | int | None) -> int | None:
    """Return the number of a version, such as 7 for `000007`, `v7` or 7."""
    match = re.fullmatch(r"(?:weight_)?v?([0-9]{1,12})", str(text))
    return None if match is None else int(match[1])


def checksum(algorithm: str, data_B: np.ndarray) -> str:
    """Return the checksum of bytes in hexadecimal digits, as the layout has it.

    Raises:
        ConfigError: the algorithm is unknown, or the library that has it is not installed.
    """
    if algorithm == "adler32":
        return f"{zlib.adler32(data_B.data):08x}"
    if algorithm not in CHECKSUMS:
        raise ConfigError(f"The checksum {algorithm!r} is none of {', '.join(CHECKSUMS)}.")
    library = {"xxh3-128": "xxhash", "blake3": "blake3"}[algorithm]
    try:
        module = importlib.import_module(library)
    except ModuleNotFoundError as error:
        raise ConfigError(f"The checksum {algorithm} needs {library}: pip install {library}.") from error
    hasher: Any = module.xxh3_128() if library == "xxhash" else module.blake3()
    hasher.update(data_B)
    return str(hasher.hexdigest())


def _decompressed(data: memoryview, most_bytes: int) -> bytes:
    """Decompress one zstd frame. Raises ValueError if it is malformed or longer."""
    import zstandard

    try:
        frame = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(data)
        found = bytearray()
        while len(found) <= most_bytes and (chunk := frame.read(min(1 << 24, most_bytes + 1 - len(found)))):
            found += chunk
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(found) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    return bytes(found)


def _apply_xor(data: memoryview, old_B: np.ndarray) -> np.ndarray:
    found = np.frombuffer(_decompressed(data, old_B.size), np.uint8)
    if found.size != old_B.size:
        raise ValueError(f"it has {found.size} bytes, the tensor {old_B.size}")
    return np.bitwise_xor(old_B, found)


def _apply_overwrite(data: memoryview, old_B: np.ndarray) -> np.ndarray:
    found = _decompressed(data, 4 + 5 * old_B.size)
    count = int.from_bytes(found[:4], "little") if len(found) >= 4 else -1
    if len(found) != 4 + 5 * count:
        raise ValueError(f"it has {len(found)} bytes for {count} changes")
    at_K = np.frombuffer(found, "<u4", count, 4)
    if count and int(at_K.max()) >= old_B.size:
        raise ValueError("it changes bytes behind the tensor's end")
    new_B = old_B.copy()
    new_B[at_K] = np.frombuffer(found, np.uint8, count, 4 + 4 * count)
    return new_B


_DECODERS: dict[str, Callable[[memoryview, np.ndarray], np.ndarray]] = {
    "xor": _apply_xor,
    "overwrite": _apply_overwrite,
}


def encode(encoding: str, old_B: np.ndarray, new_B: np.ndarray) -> bytes:
    """Return the entry of a tensor that changed.

    Raises:
        ConfigError: the encoding is `overwrite` and the tensor has 4 GiB or more.
    """
    import zstandard

    changed = old_B ^ new_B
    if encoding == "overwrite":
        if new_B.size >= 1 << 32:
            raise ConfigError("Tensors of 4 GiB and more have no `overwrite`; use the encoding xor.")
        at_K = np.flatnonzero(changed).astype("<u4")
        changed = np.concatenate(
            (np.array([at_K.size], "<u4").view(np.uint8), at_K.view(np.uint8), new_B[at_K])
        )
    return zstandard.ZstdCompressor(level=1).compress(changed)
