"""The anchor of a sharded trainer: collected tensor by tensor and written file by file, to the first rank's local disk."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file

from deltasync import anchor
from deltasync.bits import tensor_of
from deltasync.peers import Peers, Range
from deltasync.shadow import Shadow
from deltasync.types import TensorSpec
from deltasync.writer import Contents

Spool = tempfile.TemporaryDirectory[str]


def collect_anchor(
    peers: Peers,
    shadow: Shadow,
    specs: Mapping[str, TensorSpec],
    held: Sequence[Mapping[str, Range]],
    fingerprints: Mapping[str, int],
    shard_bytes: int,
) -> tuple[Spool | None, list[tuple[str, Contents]], int]:
    """The weight files of the shadow's version. All ranks call it; the first one holds at most one file in memory.

    Args:
        peers: All ranks.
        shadow: What this one holds.
        specs: Of the tensors, in the same order on all ranks.
        held: Ranges of each rank.
        fingerprints: Of the whole tensors.
        shard_bytes: See `anchor.weight_files`.

    Returns:
        Where the files lie, in the system's directory for temporary files, and (file name, contents), both at the first
        rank only; and the bytes of the weights.

    Raises:
        OSError: no room on the first rank's disk; then all ranks raise.
        PublishError: a rank did not answer.
    """
    first = peers.rank == 0
    sizes = {name: spec.element_count * spec.item_bytes for name, spec in specs.items()}
    files = anchor.shards(sizes, shard_bytes)
    contents: list[tuple[str, Contents]] = []
    written = 0
    spool: Spool | None = None
    problem: Exception | None = None
    try:
        for file_name, names in files.items():
            tensors = {}
            for name in names:
                whole_N = peers.collect(shadow.bits[name], [ranges[name] for ranges in held])
                if first:
                    tensors[name] = tensor_of(whole_N, specs[name])
            if not first or problem is not None:
                continue  # the others go on sending, whatever went wrong here
            try:
                spool = spool or tempfile.TemporaryDirectory(prefix="deltasync-")
                path = Path(spool.name, file_name)
                save_file(tensors, path, anchor.metadata(fingerprints, names))
                contents.append((file_name, path))
                written += path.stat().st_size
            except Exception as error:  # noqa: BLE001 - raised below, on all ranks
                problem = error
        (weight_bytes,) = peers.agree(problem, written)
    except BaseException:
        if spool is not None:
            spool.cleanup()
        raise
    if first and len(files) > 1:
        contents.append((anchor.INDEX, anchor.index(sizes, files)))
    return spool, contents, weight_bytes
