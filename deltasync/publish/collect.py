"""Full weights on their way to a store, one file at a time: of a shadow that goes on, or from all ranks of a trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from deltasync.channel import anchors
from deltasync.channel.documents import COMPRESSED, Anchor, File
from deltasync.config import PublisherSettings
from deltasync.publish.shadow import Shadow
from deltasync.ranks.peers import Peers, Range
from deltasync.tensors import TensorSpec

_STORED_AT_ONCE = 2
"""So that the disk or the line is never idle while a file begins or ends."""

_MOST_BESIDE_BYTES = 1 << 27
"""A larger file is stored before the next one is made."""

Files = Iterator[tuple[str, bytes | memoryview]]


class Weights:
    """The weight files of one version: name and content of each, made when it is asked for.

    `close` gives back what they are made from.
    """

    def __init__(self, files: Files, close: Callable[[], None]) -> None:
        self.files = files
        self.close = close

    @classmethod
    def of(cls, shadow: Shadow, settings: PublisherSettings) -> Weights:
        """What a shadow with the whole model holds now; it may advance meanwhile."""
        snapshot = shadow.snapshot()
        return cls(_files(shadow.specs, snapshot.take, snapshot.fingerprints, settings), snapshot.close)

    def put(
        self, put_file: Callable[[str, str, bytes | memoryview], File], folder: str, companions: Mapping[str, bytes]
    ) -> Anchor:
        """Store all files in an anchor's folder, two at a time, while the next one is made; `companions` lie beside them.

        Raises:
            CorruptDataError: the weights in memory are damaged.
            StoreError, OSError: as `put_file`, or the local disk failed.
        """
        beside = [put_file(folder, name, data) for name, data in companions.items()]
        stored: list[Future[File]] = []
        with ThreadPoolExecutor(_STORED_AT_ONCE, thread_name_prefix="deltasync-anchor") as pool:
            for name, data in self.files:
                if len(stored) >= _STORED_AT_ONCE:
                    stored[-_STORED_AT_ONCE].result()  # so that no more are in memory
                stored.append(pool.submit(put_file, folder, name, data))
                if len(data) > _MOST_BESIDE_BYTES:
                    stored[-1].result()
                del data  # before the next one is made
        weights = [future.result() for future in stored]
        if weights[-1].key.endswith(anchors.INDEX):
            beside.append(weights.pop())
        return Anchor(directory=folder, files=weights, companions=beside)


def requires_of(settings: PublisherSettings) -> list[str]:
    """What readers must know to read weights that are written so."""
    return [] if settings.anchor_compression == "none" else [COMPRESSED]


def collect_weights(
    peers: Peers,
    shadow: Shadow,
    specs: Mapping[str, TensorSpec],
    held: Sequence[Mapping[str, Range]],
    fingerprints: Mapping[str, int],
    settings: PublisherSettings,
) -> Weights | None:
    """The weight files of a sharded trainer, in a temporary directory of the first rank; None at the others.

    All ranks call this, with tensors in the same order, the ranges of each rank and the fingerprints of the whole tensors.

    Raises:
        OSError: no room on the first rank's disk; then all ranks raise.
        PublishError: a rank did not answer.
    """

    def collect(name: str) -> np.ndarray:
        return peers.collect(shadow.bits[name], [ranges[name] for ranges in held])

    if peers.rank:
        for names in anchors.shards(specs, settings.shard_bytes).values():
            for name in names:
                collect(name)
        peers.agree(None)
        return None
    folder = tempfile.TemporaryDirectory(prefix="deltasync-")
    paths: list[Path] = []
    problem: Exception | None = None
    try:
        files = _files(specs, lambda name, out_N: np.copyto(out_N, collect(name)), fingerprints, settings)
        for name, data in files:  # to the end: the others go on sending
            if problem is None:
                try:
                    paths.append(Path(folder.name, name))
                    paths[-1].write_bytes(data)
                except OSError as error:
                    problem = error
        peers.agree(problem)
    except BaseException:
        folder.cleanup()
        raise
    return Weights(((path.name, path.read_bytes()) for path in paths), folder.cleanup)


def _files(
    specs: Mapping[str, TensorSpec],
    take: Callable[[str, np.ndarray], None],
    fingerprints: Mapping[str, int],
    settings: PublisherSettings,
) -> Files:
    compression = None if settings.anchor_compression == "none" else settings.anchor_compression
    return anchors.taken_files(specs, take, fingerprints, settings.shard_bytes, compression)
