"""A free start: which checkpoint, that everybody has, a channel's first version is a reference to."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from deltasync import fingerprint
from deltasync.channel import checkpoint
from deltasync.channel.checkpoint import Checkpoint
from deltasync.channel.documents import Reference
from deltasync.publish.shadow import Shadow
from deltasync.ranks.peers import Peers, attempt
from deltasync.types import Patch


def load_initial(peers: Peers, where: str | Path) -> Checkpoint:
    """The checkpoint, which every rank loads; the first one decides which commit it is.

    Raises:
        ConfigError, CorruptDataError: a rank cannot load it; then all raise.
    """
    decided = peers.first(lambda: checkpoint.find(where))
    found, problem = attempt(lambda: checkpoint.load(decided))
    peers.agree(problem)
    assert found is not None
    return found


def refer(peers: Peers, initial: Checkpoint, shadow: Shadow) -> tuple[Reference, dict[str, Patch]]:
    """What it takes to refer to a checkpoint in the place of a model.

    Args:
        peers: All ranks.
        initial: Of that model, or one like it.
        shadow: What this rank holds of the model.

    Returns:
        The reference; what leads from this rank's ranges of the checkpoint to the model.

    Raises:
        ModelMismatchError, CorruptDataError: as `Checkpoint.read`; then all ranks raise.
    """
    alike = peers.share(initial.alike(shadow.specs, shadow.bits))
    tied = {}
    for name, others in alike[0].items():
        both = [other for other in others if all(other in found.get(name, ()) for found in alike)]
        if both:
            tied[name] = both[0]
    reference = dataclasses.replace(initial.reference, tied=tied)
    source = Checkpoint(reference, initial.files)
    found, problem = attempt(lambda: checkpoint.compare(source, shadow.specs, shadow.ranges, shadow.bits))
    parts, changes = found or ({}, {})
    digests = peers.agree(problem, *(parts.get(name, 0) for name in shadow.specs))
    named = {name: fingerprint.to_hex(digest) for name, digest in zip(shadow.specs, digests, strict=True)}
    return dataclasses.replace(reference, fingerprints=named), changes
