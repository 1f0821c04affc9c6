"""Full weights as files, made one at a time: of a shadow that goes on advancing, or from all ranks of a trainer."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from deltasync import limits
from deltasync.channel import anchors
from deltasync.publish.shadow import Shadow
from deltasync.ranks.ranks import Range, Ranks
from deltasync.tensors import TensorSpec

Files = Iterator[tuple[str, bytes | memoryview]]


class Weights(NamedTuple):
    """The weight files of one version."""

    files: Files  # name and content of each, made when it is asked for
    close: Callable[[], None]  # frees what they are made from

    @classmethod
    def of(cls, shadow: Shadow) -> Self:
        """Return the weights that a shadow with the whole model holds now; it may advance meanwhile."""
        snapshot = shadow.snapshot()
        return cls(_files(shadow.specs, snapshot.take), snapshot.close)


def collect_weights(
    ranks: Ranks,
    shadow: Shadow,
    specs: Mapping[str, TensorSpec],
    held: Sequence[Mapping[str, Range]],
    fingerprints: Mapping[str, int],
) -> Weights | None:
    """Collect the weight files of a sharded trainer in a temporary directory of the first rank; return None at the others.

    All ranks call this. `specs` and `fingerprints` are of the whole tensors, in the same order on all ranks; `held` has the
    ranges of each rank.

    Raises:
        OSError: the first rank's disk is full; then all ranks raise.
        PublishError: a rank did not answer.
    """

    def collect(name: str, out_N: np.ndarray | None = None) -> None:
        ranks.collect(shadow.bits[name], [ranges[name] for ranges in held], out_N)

    if ranks.rank:
        for name in specs:
            collect(name)
        ranks.agree(None)
        return None
    folder = tempfile.TemporaryDirectory(prefix="deltasync-")
    paths: list[Path] = []
    problem: Exception | None = None

    def take(name: str, out_N: np.ndarray) -> int:
        collect(name, out_N)
        return fingerprints[name]

    def room(name: str, size: int) -> np.ndarray:
        nonlocal problem
        try:
            return _mapped(Path(folder.name, name), size)
        except OSError as error:
            problem = problem or error
            return np.empty(size, np.uint8)  # the others go on sending

    try:
        for name, data in _files(specs, take, room):
            paths.append(Path(folder.name, name))
            if problem is None and not paths[-1].exists():
                try:
                    paths[-1].write_bytes(data)
                except OSError as error:
                    problem = error
        ranks.agree(problem)
    except BaseException:
        folder.cleanup()
        raise
    return Weights(((path.name, _read(path)) for path in paths), folder.cleanup)


def _mapped(path: Path, size: int) -> np.ndarray:
    """Return the bytes of a new file on the disk, which the system writes and drops from memory as it likes.

    Raises:
        OSError: the disk has no room for them; nothing of it would be known while the bytes are set.
    """
    with path.open("xb+") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)


def _read(path: Path) -> memoryview:
    """Return the bytes of a file, which are read as they are used."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _files(specs: Mapping[str, TensorSpec], take: anchors.Take, room: anchors.Room | None = None) -> Files:
    return anchors.taken_files(specs, take, limits.WEIGHT_FILE_BYTES, room)
