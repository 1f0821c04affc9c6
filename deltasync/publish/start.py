"""How a publisher starts: what it finds in a channel, and what it compares its first stream with."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from deltasync.channel import checkpoint, documents, plan, signing
from deltasync.channel.checkpoint import Checkpoint
from deltasync.channel.documents import Channel, Reference, Version
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.config import PublisherSettings, Retention
from deltasync.errors import (
    ApplyError,
    ChainError,
    ConfigError,
    FormatError,
    ModelMismatchError,
    UnsupportedFormatError,
)
from deltasync.publish import put
from deltasync.publish.log import Log
from deltasync.publish.opening import open_channel
from deltasync.publish.shadow import Shadow, check_coverage
from deltasync.publish.stream import Stream
from deltasync.publish.upload import Since
from deltasync.ranks.peers import Peers, Range, attempt
from deltasync.replicas import Replica
from deltasync.stores import Store
from deltasync.tensors import Patch, TensorSpec, check_specs, fingerprint

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's file; its scaling is no weight."""


class Start(NamedTuple):
    """What the first rank found in a channel, for all."""

    settings: PublisherSettings
    channel: Channel | None
    run_id: str
    number: int  # of the newest version, readable or not; 0 if there is none
    way: Sequence[Stored]  # what leads to it from nothing, without the bytes; empty if it cannot be read
    trusted: list[str] | None  # keys of writers, None if everything is taken

    @property
    def end(self) -> Version:
        """The newest version, which can be read."""
        return self.way[-1].version

    @property
    def since(self) -> Since:
        """What a late joiner fetches."""
        if not self.way:
            return Since()
        first, *others = self.way
        by_reference = first.record.reference is not None
        return Since(first.version.version, by_reference, sum(stored.record.payload_bytes for stored in others))

    def reads_otherwise(self, files: Mapping[str, bytes]) -> bool:
        """Whether these files change what an adapter's weights mean: replicas learn that from full weights only."""
        anchor = self.way[0].record.anchor if self.way and ADAPTER_CONFIG in files else None
        known = {} if anchor is None else {file.key.rpartition("/")[2]: file.sha256 for file in anchor.companions}
        return ADAPTER_CONFIG in known and known[ADAPTER_CONFIG] != documents.sha256_hex(files[ADAPTER_CONFIG])


def open_first(store: Store, settings: PublisherSettings, resume: bool) -> tuple[Start, Log]:
    """Open a channel to write to it, and find the way to its newest version; raises as `open_channel`."""
    signer = signing.signer_of(settings)
    trusted = None if signer is None else signer.trusted
    reader = ChannelReader(store, trusted)
    log = open_channel(reader, settings, resume, signer)
    way, tip = list[Stored](), log.tip
    if tip is not None:
        try:
            put.looked(settings, lambda: reader.record(tip))
            way = [dataclasses.replace(stored, data=None) for stored in plan.find_way(reader, None, tip)]
        except UnsupportedFormatError:
            raise
        except (FormatError, ChainError) as error:
            logger.warning("Version %s cannot be read: %s The next version has full weights.", tip, error)
    number = 0 if tip is None else tip.version
    return Start(settings, log.channel, log.run_id, number, way, None if trusted is None else trusted.names), log


def check_sharded(retention: Retention, shadow: str | Path | None) -> None:
    """Refuse what no rank of a sharded trainer can do, by a ConfigError."""
    if shadow is not None:
        raise ConfigError("A sharded trainer cannot resume from a saved shadow; without it each rank reads the channel.")
    if retention.fold_every:
        raise ConfigError("A sharded trainer writes no folds; leave fold_every at 0 and run `deltasync fold`.")


class Begun(NamedTuple):
    """What the first stream told."""

    channel: Channel
    held: Sequence[Mapping[str, Range]]  # by each rank
    shadow: Shadow  # the bits of the stream, of this rank's ranges
    resumed: bool  # whether it goes on from the newest version
    changes: dict[str, Patch]  # steps from that version, or from the reference, to the stream
    reference: Reference | None  # of version 1


class FirstStream:
    """Compares the first stream with what there is: the version that is resumed, or a checkpoint that everybody has.

    Of a sharded trainer only that stream tells who holds what, so which parts of the version are to be read.

    Args:
        initial: The checkpoint for a new channel, which every rank loads; the first one decides which commit it is.
        saved: A directory with a shadow to start from, if it is of the model and a version that is still known.

    Raises:
        ConfigError, CorruptDataError: a rank cannot load the checkpoint; then all raise.
    """

    def __init__(
        self, peers: Peers, reader: ChannelReader, start: Start, initial: str | Path | None, saved: str | Path | None
    ) -> None:
        self.start = start
        self.initial: Checkpoint | None = None
        if initial is not None and not start.number:
            decided = peers.first(lambda: checkpoint.find(initial))
            self.initial = peers.all(lambda: checkpoint.load(decided))
        self._peers = peers
        self._reader = reader
        self._saved = saved
        self._resumes = bool(start.way)

    def compare(self, named_tensors: Stream, channel: Channel | None, dtype: str, refers: bool) -> Begun:
        """Take the first stream, whose version may be a reference if it `refers`.

        Raises:
            ModelMismatchError, ConfigError: at all ranks. Nothing was taken.
        """
        peers = self._peers

        def read() -> Shadow:
            shadow = Shadow.of(named_tensors, dtype, peers.rank)
            if channel is not None:
                check_specs(channel.specs, shadow.specs, "The published model")
            return shadow

        first = peers.all(read)
        shared = peers.share((channel or _new_channel(first.specs, dtype), first.ranges))
        channel, held = shared[0][0], [ranges for _, ranges in shared]
        for rank, (other, _) in enumerate(shared):
            if other.tensors_sha256 != channel.tensors_sha256:
                raise ModelMismatchError(f"Rank {rank} publishes other names, dtypes or shapes than rank 0.")
        check_coverage(channel.specs, held)
        resumed = self.resumed(first.ranges)
        if resumed is not None:
            return Begun(channel, held, resumed, True, resumed.advance(first.stream(), "keep", peers.rank), None)
        if self.initial is None or not refers:
            return Begun(channel, held, first, False, {}, None)
        reference, changes = _refer(peers, self.initial, first)
        if changes:
            logger.warning("%d tensors are not as in %s; they follow as a delta.", len(changes), reference)
        return Begun(channel, held, first, False, changes, reference)

    def resumed(self, ranges: Mapping[str, Range]) -> Shadow | None:
        """These ranges of the version that is resumed, once; None if there is none, or if it cannot be read."""
        if not self._resumes:
            return None
        self._resumes, start = False, self.start
        shadow, problem = attempt(lambda: self._read(ranges))
        damage = problem if isinstance(problem, FormatError | ChainError | ApplyError) else None
        added = 0 if shadow is None else sum(shadow.fingerprints.values())
        damaged, total = self._peers.agree(None if damage else problem, damage is not None, added)
        if damaged or fingerprint.to_hex(total) != start.way[-1].record.fingerprint:
            why = damage or "on another rank, or it has other bits than it promises"
            logger.warning("Version %s cannot be read: %s The next version has full weights.", start.end, why)
            return None
        return shadow

    def _read(self, ranges: Mapping[str, Range]) -> Shadow:
        """The newest version's bits. Whether they are right only the fingerprint over all ranks can tell."""
        if self._peers.size > 1:
            return Shadow.read(self._reader, self.start.way, ranges)
        replica = Replica(self._reader)
        if self._saved is not None:
            try:
                logger.info("saved shadow version=%s", replica.load(self._saved))
            except (ConfigError, FormatError, ChainError, ModelMismatchError) as error:
                logger.warning("The saved shadow is not used: %s", error)
        replica.sync()
        if replica.identity != self.start.end:
            raise ChainError(f"the newest version that can be read is {replica.identity}.")
        return Shadow.whole(replica.state_dict())


def _new_channel(specs: Mapping[str, TensorSpec], dtype: str) -> Channel:
    """A channel for this model; `Log.create_channel` fills in what is the log's business."""
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


def _refer(peers: Peers, initial: Checkpoint, shadow: Shadow) -> tuple[Reference, dict[str, Patch]]:
    """What it takes to refer to a checkpoint in the place of a model, and what leads from it to this rank's ranges.

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
