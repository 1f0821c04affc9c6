"""Start a publisher: read what a channel holds, and compare the first stream with that or with a checkpoint."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from deltasync.channel import adapter_base, checkpoint, documents, plan, signing
from deltasync.channel.checkpoint import Checkpoint
from deltasync.channel.documents import Channel, Reference, VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.config import PublisherSettings
from deltasync.errors import ApplyError, ChainError, CorruptDataError, FormatError, ModelMismatchError
from deltasync.following import Replica
from deltasync.publish import put
from deltasync.publish.log import Log
from deltasync.publish.opening import open_channel
from deltasync.publish.ownership import Ownership
from deltasync.publish.shadow import Shadow, check_coverage
from deltasync.publish.stream import Stream
from deltasync.ranks.peers import Peers, Range, attempt
from deltasync.stores import Store
from deltasync.tensors import Delta, TensorSpec, check_specs, fingerprint

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's file. It has the scaling of an adapter, which is in none of its weights."""


class Start(NamedTuple):
    """What the first rank found in a channel, for all ranks."""

    settings: PublisherSettings
    channel: Channel | None
    run_id: str
    number: int  # of the newest version, readable or not; 0 if there is none
    chain: Sequence[
        StoredRecord
    ]  # the records that lead to it from nothing, without bytes; empty if nothing can build on it
    trusted: list[str] | None  # keys of writers, None if everything is taken

    @property
    def end(self) -> VersionId:
        """The newest version, which the next one builds on."""
        return self.chain[-1].version


def open_first(store: Store, settings: PublisherSettings, resume: bool, files: Mapping[str, bytes]) -> tuple[Start, Log]:
    """Open a channel to write to it, and find the chain to its newest version. Raises as `open_channel`.

    The next version has full weights if `files`, beside them, change what an adapter's weights mean.
    """
    signer = signing.signer_of(settings)
    reader = ChannelReader(store, None if signer is None else signer.trusted)
    log = open_channel(reader, settings, resume, signer)
    chain, tip = list[StoredRecord](), log.tip
    if tip is not None:
        try:
            put.reread(settings, lambda: reader.record(tip))
            chain = [dataclasses.replace(stored, data=None) for stored in plan.find_chain(reader, None, tip)]
            if _has_other_adapter(chain[0], files):
                logger.info("The adapter of version %s has another config or base. The next version has full weights.", tip)
                chain = []
        except (CorruptDataError, ChainError) as error:
            logger.warning("Version %s cannot be read: %s The next version has full weights.", tip, error)
    number = 0 if tip is None else tip.version
    return Start(settings, log.channel, log.run_id, number, chain, None if signer is None else signer.trusted.names), log


def _has_other_adapter(stored: StoredRecord, files: Mapping[str, bytes]) -> bool:
    """Whether these files change the config or the base of an adapter, which replicas learn with full weights only."""
    anchor = stored.record.anchor
    known = {} if anchor is None else {file.key.rpartition("/")[2]: file.sha256 for file in anchor.model_files}
    changed = {name for name, data in files.items() if known.get(name) != documents.sha256_hex(data)}
    return ADAPTER_CONFIG in known and not changed.isdisjoint((ADAPTER_CONFIG, adapter_base.FILE))


class Begun(NamedTuple):
    """What the first stream holds."""

    channel: Channel
    held: Sequence[Mapping[str, Range]]  # the ranges of each rank
    shadow: Shadow  # the bits of the stream, of this rank's ranges
    resumed: bool  # whether it continues from the newest version
    changes: list[Delta]  # steps from that version, or from the reference, to the stream
    reference: Reference | None  # of version 1


class FirstStream:
    """Compares the first stream with the version that is resumed, or with a checkpoint that everybody has.

    Only that stream tells which ranges each rank of a sharded trainer holds, and so has to read.

    Args:
        peers: The ranks.
        owned: Tells which of them publishes what.
        reader: The channel's.
        start: What the channel holds.
        initial: The checkpoint for a new channel. Every rank loads it; the first one decides which commit it is.

    Raises:
        ConfigError, CorruptDataError: a rank cannot load the checkpoint; then all raise.
    """

    def __init__(
        self,
        peers: Peers,
        owned: Ownership,
        reader: ChannelReader,
        start: Start,
        initial: str | Path | None,
    ) -> None:
        self.start = start
        self.initial: Checkpoint | None = None
        if initial is not None and not start.number:
            reference = peers.first(lambda: checkpoint.find(initial))
            self.initial = peers.all(lambda: checkpoint.load(reference))
        self._peers, self._owned = peers, owned
        self._reader = reader
        self._resumes = bool(start.chain)

    def compare(self, named_tensors: Stream, channel: Channel | None, dtype: str, may_refer: bool) -> Begun:
        """Take the first stream. With `may_refer` its version may be a reference.

        Raises:
            ModelMismatchError, ConfigError: at all ranks. Nothing was taken.
        """
        peers = self._peers

        stream = self._owned.first(named_tensors, dtype)

        def read() -> Shadow:
            shadow = Shadow.of(stream, dtype, peers.rank)
            if channel is not None:
                check_specs(channel.specs, shadow.specs, "The published model")
            return shadow

        first = peers.all(read)
        first = _without(first, self._owned.settle())
        table = channel or _new_channel(first.specs, dtype)
        shared = peers.share((table if peers.rank == 0 else None, table.tensors_sha256, first.ranges))
        channel, held = shared[0][0], [ranges for *_, ranges in shared]
        assert channel is not None
        for rank, (_, digest, _) in enumerate(shared):
            if digest != channel.tensors_sha256:
                raise ModelMismatchError(f"Rank {rank} publishes other names, dtypes or shapes than rank 0.")
        check_coverage(channel.specs, held)
        resumed = self.resumed(first.ranges)
        if resumed is not None:
            return Begun(channel, held, resumed, True, resumed.advance(first.stream(), "keep", peers.rank), None)
        if self.initial is None or not may_refer:
            return Begun(channel, held, first, False, [], None)
        reference, changes = _refer(peers, self.initial, first)
        if changes:
            differing = sum(len(delta.counts()) for delta in changes)
            logger.warning("%d tensors are not as in %s; they follow as a delta.", differing, reference)
        return Begun(channel, held, first, False, changes, reference)

    def resumed(self, ranges: Mapping[str, Range]) -> Shadow | None:
        """Read these ranges of the version to resume, once. Return None if there is none, or if it cannot be read."""
        if not self._resumes:
            return None
        self._resumes, start = False, self.start
        shadow, problem = attempt(lambda: self._read(ranges))
        damage = problem if isinstance(problem, FormatError | ChainError | ApplyError) else None
        added = 0 if shadow is None else sum(shadow.fingerprints.values())
        damaged, total = self._peers.agree(None if damage else problem, damage is not None, added)
        if damaged or fingerprint.to_hex(total) != start.chain[-1].record.fingerprint:
            why = damage or "on another rank, or its bits do not have its fingerprint."
            logger.warning("Version %s cannot be read: %s The next version has full weights.", start.end, why)
            return None
        return shadow

    def _read(self, ranges: Mapping[str, Range]) -> Shadow:
        """Read the newest version's bits. The caller checks the fingerprint over all ranks."""
        if self._peers.size > 1:
            return Shadow.read(self._reader, self.start.chain, ranges)
        replica = Replica(self._reader)
        replica.sync()
        if replica.identity != self.start.end:
            raise ChainError(f"the newest version that can be read is {replica.identity}.")
        return Shadow.whole(replica.state_dict())


def _without(shadow: Shadow, names: Sequence[str]) -> Shadow:
    """Return a shadow that holds nothing of these tensors."""
    if not names:
        return shadow
    ranges = dict(shadow.ranges) | dict.fromkeys(names, (0, 0))
    return Shadow(shadow.specs, ranges, shadow.bits | {name: shadow.bits[name][:0].copy() for name in names})


def _new_channel(specs: Mapping[str, TensorSpec], dtype: str) -> Channel:
    """Return a channel for this model. `Log.create_channel` fills in the rest."""
    table = {name: (spec.dtype, spec.shape) for name, spec in specs.items()}
    return Channel(
        run_id="-",
        created_at=documents.now(),
        fencing="",
        epoch="",
        dtype=dtype,
        tensors=table,
        tensors_sha256=documents.table_sha256(table),
    )


def _refer(peers: Peers, initial: Checkpoint, shadow: Shadow) -> tuple[Reference, list[Delta]]:
    """Return a reference to a checkpoint in the place of a model, and the steps from there to this rank's ranges.

    Raises:
        ModelMismatchError, CorruptDataError: as `Checkpoint.read`; then all ranks raise.
    """
    alike = peers.share(initial.alike(shadow.specs, shadow.bits))
    tied = {}
    for name, others in alike[0].items():
        on_all_ranks = [other for other in others if all(other in found.get(name, ()) for found in alike)]
        if on_all_ranks:
            tied[name] = on_all_ranks[0]
    reference = dataclasses.replace(initial.reference, tied=tied)
    source = Checkpoint(reference, initial.files)
    compared, problem = attempt(lambda: checkpoint.compare(source, shadow.layout, shadow.ranges, shadow.bits))
    parts, changes = compared or ({}, [])
    digests = peers.agree(problem, *(parts.get(name, 0) for name in shadow.specs))
    named = {name: fingerprint.to_hex(digest) for name, digest in zip(shadow.specs, digests, strict=True)}
    return dataclasses.replace(reference, fingerprints=named), changes
