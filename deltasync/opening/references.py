"""Weights outside the channel: those that a version refers to, those of a directory, and ranges of each."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from deltasync.channel import payloads
from deltasync.channel.documents import Record, Reference
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import (
    ConfigError,
    CorruptDataError,
    MissingVersionError,
    ModelMismatchError,
    first_five,
)
from deltasync.kernels import native
from deltasync.opening import checkpoint, ranges
from deltasync.tensors import TensorSpec, fingerprint, weight_bytes

_REFERENCE_BYTES = 8, 64 << 20  # of a checkpoint for each byte of the channel's model, and in addition


def local(
    directory: str | Path, tied: Mapping[str, str], specs: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, np.ndarray]]:
    """Read the bits of a model in a directory, some of whose tensors it may have under another name only.

    Raises:
        ConfigError, FormatError, ModelMismatchError: it is no checkpoint of this model.
    """
    found = dataclasses.replace(checkpoint.find(Path(directory)), tied=dict(tied))
    yield from checkpoint.load(found).read(specs)


def ranges_of_weights(
    reader: ChannelReader, stored: StoredRecord, wanted: ranges.Ranges
) -> Iterator[ranges.Piece]:
    """Read ranges of full weights in pieces. The caller checks the fingerprint of all ranges together."""
    record, specs = stored.record, reader.specs
    if record.reference is not None:
        with _loading(record.version, record.reference):
            yield from _referred(reader, record.version, record.reference).ranges(specs, wanted)
        return
    with payloads.each_once(reader, record) as note:
        for file in record.payload_files:
            ranged = ranges.RangedFile(file.bytes, functools.partial(reader.read_range, file))
            with payloads.naming(file.key):
                for found in ranges.read_weights(ranged, specs, wanted):
                    if isinstance(found, str):
                        note(found)
                    else:
                        yield found


def unlike(reader: ChannelReader, reference: Reference, fingerprints: Mapping[str, int]) -> str:
    """A sentence that names the tensors here whose fingerprints are not those of a reference."""
    wrong = [
        name for name, digest in reference.fingerprints.items() if fingerprints.get(name) != int(digest, 16)
    ]
    return f"The weights here are not those of {reference}: {_differing(wrong, reader.specs)}"


def weights(reader: ChannelReader, record: Record) -> Iterator[tuple[str, np.ndarray, int]]:
    """Read the weights that a record refers to, as `payloads.weights`."""
    assert record.reference is not None
    version, reference = record.version, record.reference
    specs, wrong = reader.specs, []
    found = _referred(reader, version, reference)
    with _loading(version, reference):
        for name, bits_N in found.read(specs):
            expected = int(reference.fingerprints[name], 16)
            if native.fingerprint(fingerprint.tensor_key(name), bits_N) == expected:
                yield name, bits_N, expected
            else:
                wrong.append(name)
    if wrong:
        raise CorruptDataError(
            f"The checkpoint {reference} is not version {version}: {_differing(wrong, specs)}"
        )


def _referred(reader: ChannelReader, version: int, reference: Reference) -> checkpoint.Checkpoint:
    """Load the checkpoint that a version refers to."""
    specs = reader.specs
    if reference.fingerprints.keys() != specs.keys():
        raise CorruptDataError(f"The reference of version {version} does not name the channel's tensors.")
    try:
        factor, more = _REFERENCE_BYTES
        limit_bytes = factor * weight_bytes(specs.values()) + more
        return checkpoint.load(reference, limit_bytes, with_token=reader.may_use_token(reference.repo))
    except ConfigError as error:
        raise MissingVersionError(
            f"Version {version} refers to the checkpoint {reference}, which this machine cannot load: {error}"
        ) from error


@contextlib.contextmanager
def _loading(version: int, reference: Reference) -> Iterator[None]:
    """Raise CorruptDataError if a checkpoint does not have the channel's tensors."""
    try:
        yield
    except ModelMismatchError as error:
        raise CorruptDataError(f"The checkpoint {reference} is not version {version}: {error}") from error


def _differing(names: Sequence[str], specs: Mapping[str, TensorSpec]) -> str:
    return f"{len(names)} of {len(specs)} tensors differ: {first_five(names)}."
