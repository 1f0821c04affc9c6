"""Compare the bits of one version with those of a checkpoint, of a server (`compare`), or of another version
(`diff`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from deltasync.channel.documents import Reference, VersionId, sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.errors import ConfigError, ModelMismatchError
from deltasync.following import Replica
from deltasync.opening import checkpoint
from deltasync.ops.copies import replica_at
from deltasync.ops.scan import progressed
from deltasync.serve import heartbeat
from deltasync.tensors import TensorSpec
from deltasync.tensors.bits import bits_of

_SERVER_S = 600.0  # wait for a server's digests: it reads all its weights


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """One tensor whose bits differ. Of a server, or of another shape, only the sentence is known."""

    tensor: str
    problem: str  # in one sentence
    index: list[int] | None = None  # position of the first differing element in the tensor
    expected: str | None = None  # bits of this element in the channel, or in the first version, hexadecimal
    found: str | None = None  # bits of this element in the other place
    count: int | None = None  # number of differing elements


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChannelComparison:
    """The result of `compare`; the channel's order of tensors everywhere."""

    version: VersionId
    equal: int  # number of tensors with the same bits
    differences: list[TensorDifference]
    absent: list[str]  # tensors of the channel that the other place lacks, such as tied ones; not compared
    extra: list[str]  # tensors that only the other place has; not compared

    @property
    def exit_code(self) -> int:
        """0 if at least one tensor was compared, and none differs."""
        return 0 if self.equal and not self.differences else ModelMismatchError.exit_code


def compare(reader: ChannelReader, place: str, version: int | None = None) -> ChannelComparison:
    """Compare a version's bits with a safetensors file, a checkpoint directory, a model on the Hub, or a
    running server.

    Args:
        reader: The channel.
        place: Path of the file or directory, `namespace/name[@revision]`, or the http URL of a server, whose
            digests are compared (`GET /deltasync/digest`).
        version: Number of the version. None for the newest, or for that of the server.

    Floating-point tensors of a checkpoint are rounded to the served dtype, to nearest even. Needs memory for
    the weights, and for one tensor more.

    Raises:
        ConfigError: there is no such file or directory, or the server serves another version.
        DeltaSyncError: the server does not answer with digests.
    """
    if place.startswith(("http://", "https://")):
        served, digests = heartbeat.digests(place, _SERVER_S)
        if version not in (None, served):
            raise ConfigError(
                f"{place} serves version {served}, not {version}. Pin the server, or leave out the version."
            )
        replica, identity = replica_at(reader, served)
        names, found = set(digests), _by_digest(replica, digests)
    else:
        path = Path(place)
        held = checkpoint.load(
            Reference(path=str(path.absolute())) if path.is_file() else checkpoint.find(place)
        )
        replica, identity = replica_at(reader, version)
        names, found = set(held.files), _by_bits(replica, held, reader.specs)
    equal, differences = _collected(found, len(reader.specs.keys() & names))
    return ChannelComparison(
        version=identity,
        equal=equal,
        differences=differences,
        absent=[name for name in reader.specs if name not in names],
        extra=sorted(names - reader.specs.keys()),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Diff:
    """The result of `diff`: two versions, the number of tensors with the same bits, and the others in the
    channel's order.
    """

    first: VersionId
    second: VersionId
    equal: int
    differences: list[TensorDifference]


def diff(reader: ChannelReader, first: int | None, second: int | None) -> Diff:
    """Compare the bits of two versions of a channel, in any order. None is the newest.

    Both are read as a replica reads them, every bit checked. Needs memory for the weights twice.

    Raises:
        MissingVersionError: one of them is not in the channel.
        NotPublishedError: the channel has no version yet.
    """
    replica, one = replica_at(reader, first)
    bits = {name: bits_of(tensor).reshape(-1).copy() for name, tensor in replica.state_dict().items()}
    replica.sync(second)
    assert replica.identity is not None
    found = (
        _difference(reader.specs[name], bits[name], bits_of(tensor).reshape(-1))
        for name, tensor in replica.state_dict().items()
    )
    equal, differences = _collected(found, len(bits))
    return Diff(first=one, second=replica.identity, equal=equal, differences=differences)


def _collected(found: Iterable[TensorDifference | None], total: int) -> tuple[int, list[TensorDifference]]:
    """Return the number of equal tensors, of so many, and the differences of the others."""
    differences, done = list[TensorDifference](), 0
    for done, difference in enumerate(found, start=1):
        differences += [] if difference is None else [difference]
        progressed("tensors", done, total)
    return done - len(differences), differences


def _by_digest(replica: Replica, digests: Mapping[str, str]) -> Iterator[TensorDifference | None]:
    for name, tensor in replica.state_dict().items():
        if name in digests:
            is_same = sha256_hex(bits_of(tensor).data) == digests[name]
            yield (
                None if is_same else TensorDifference(tensor=name, problem="The sha256 of its bits differs.")
            )


def _by_bits(
    replica: Replica, held: checkpoint.Checkpoint, specs: Mapping[str, TensorSpec]
) -> Iterator[TensorDifference | None]:
    for name, tensor in replica.state_dict().items():
        if name in held.files:
            try:
                ((_, bits_N),) = held.read({name: specs[name]})
            except ModelMismatchError as error:
                yield TensorDifference(tensor=name, problem=str(error))
            else:
                yield _difference(specs[name], bits_of(tensor).reshape(-1), bits_N.reshape(-1))


def _difference(spec: TensorSpec, expected_N: np.ndarray, found_N: np.ndarray) -> TensorDifference | None:
    at_K = np.flatnonzero(expected_N != found_N)
    if not at_K.size:
        return None
    first, digits = int(at_K[0]), 2 * expected_N.itemsize
    return TensorDifference(
        tensor=spec.name,
        problem=f"{at_K.size:,} of {expected_N.size:,} elements differ.",
        index=[int(axis) for axis in np.unravel_index(first, spec.shape)],
        expected=f"0x{int(expected_N[first]):0{digits}x}",
        found=f"0x{int(found_N[first]):0{digits}x}",
        count=int(at_K.size),
    )
