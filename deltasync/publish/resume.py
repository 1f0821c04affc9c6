"""What a publisher finds when it opens a channel, and what it compares its first stream with."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from deltasync import fingerprint
from deltasync.channel import documents, plan, signing
from deltasync.channel.checkpoint import Checkpoint
from deltasync.channel.documents import Channel, Reference, Version
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.config import PublisherSettings, Retention
from deltasync.errors import ApplyError, ChainError, ConfigError, FormatError, ModelMismatchError
from deltasync.follow import Replica
from deltasync.publish.initial import refer
from deltasync.publish.log import Log
from deltasync.publish.opening import open_channel
from deltasync.publish.shadow import Shadow, Stream, check_coverage
from deltasync.publish.upload import Since
from deltasync.ranks.peers import Peers, Range, attempt
from deltasync.stores import Store
from deltasync.types import Patch, TensorSpec, check_specs

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """What the first rank found in a channel, for all.

    Attributes:
        settings: The first rank's.
        channel: None if there is none yet.
        run_id: The run.
        number: Number of the newest version, readable or not; 0 if there is none.
        way: What leads to it from nothing, without the bytes; empty if it cannot be read.
        trusted: Keys of writers, None if everything is taken.
    """

    settings: PublisherSettings
    channel: Channel | None
    run_id: str
    number: int
    way: Sequence[Stored]
    trusted: list[str] | None

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
        return Since(first.version.version, by_reference, sum(stored.payload_bytes for stored in others))


def open_first(store: Store, settings: PublisherSettings, resume: bool) -> tuple[Start, Log]:
    """Open a channel to write to it.

    Raises:
        ChannelInUseError, ConfigError, FencedError, StoreError: as `open_channel`.
    """
    signer = signing.signer_of(settings)
    trusted = None if signer is None else signer.trusted
    reader = ChannelReader(store, trusted)
    opened = open_channel(reader, settings, resume, signer)
    version, way = opened.end_version, list[Stored]()
    if opened.end is not None and version is not None:
        try:
            way = [dataclasses.replace(stored, data=None) for stored in plan.find_way(reader, None, version)]
        except (FormatError, ChainError) as error:
            logger.warning("Version %s cannot be read: %s The next version has full weights.", version, error)
    names = None if trusted is None else trusted.names
    start = Start(
        settings=settings,
        channel=opened.channel,
        run_id=opened.log.run_id,
        number=0 if version is None else version.version,
        way=way,
        trusted=names,
    )
    return start, opened.log


def read_shadow(reader: ChannelReader, start: Start, ranges: Mapping[str, Range] | None, saved: str | Path | None) -> Shadow:
    """The newest version's bits. Whether they are right only the fingerprint over all ranks can tell.

    Args:
        reader: The channel's.
        start: What was found in it.
        ranges: What this rank holds of each tensor; None for everything.
        saved: A directory with a shadow to start from, if it is of the model and a version that is still known.

    Raises:
        StoreError, ChainError, FormatError, ApplyError: they cannot be read.
    """
    if ranges is not None:
        return Shadow.read(reader, start.way, ranges)
    replica = Replica(reader)
    if saved is not None:
        try:
            logger.info("saved shadow version=%s", replica.load(saved))
        except (ConfigError, FormatError, ChainError, ModelMismatchError) as error:
            logger.warning("The saved shadow is not used: %s", error)
    replica.sync()
    if replica.identity != start.end:
        raise ChainError(f"the newest version that can be read is {replica.identity}.")
    return Shadow.whole(replica.state_dict())


def new_channel(specs: Mapping[str, TensorSpec], dtype: str) -> Channel:
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


@dataclasses.dataclass(frozen=True, slots=True)
class Begun:
    """What the first stream told.

    Attributes:
        channel: The channel.
        held: Ranges of each rank.
        shadow: The bits of the stream, of this rank's ranges.
        resumed: Whether it goes on from the newest version.
        changes: Steps from that version, or from the reference, to the stream.
        reference: What version 1 refers to.
    """

    channel: Channel
    held: Sequence[Mapping[str, Range]]
    shadow: Shadow
    resumed: bool
    changes: dict[str, Patch]
    reference: Reference | None


class FirstStream:
    """Compares the first stream with what there is: the version that is resumed, or a checkpoint that everybody has.

    Of a sharded trainer only that stream tells who holds what, so which parts of the version are to be read.

    Args:
        peers: All ranks.
        reader: The channel's.
        start: What was found in it.
        initial: The checkpoint.
        saved: See `read_shadow`.
    """

    def __init__(
        self, peers: Peers, reader: ChannelReader, start: Start, initial: Checkpoint | None, saved: str | Path | None
    ) -> None:
        self.start = start
        self.initial = initial
        self._peers = peers
        self._reader = reader
        self._saved = saved
        self._resumes = bool(start.way)

    def compare(self, named_tensors: Stream, channel: Channel | None, dtype: str, refers: bool) -> Begun:
        """Take the first stream.

        Args:
            named_tensors: The stream.
            channel: None if there is none yet.
            dtype: The served one.
            refers: Whether the version may be a reference.

        Raises:
            ModelMismatchError, ConfigError: at all ranks. Nothing was taken.
        """
        peers = self._peers
        first, problem = attempt(lambda: Shadow.of(named_tensors, dtype, peers.rank))
        if first is not None and channel is not None:
            known = channel.specs
            _, problem = attempt(lambda: check_specs(known, first.specs, "The published model"))
        peers.agree(problem)
        assert first is not None
        told = peers.share((channel or new_channel(first.specs, dtype), first.ranges))
        channel, held = told[0][0], [ranges for _, ranges in told]
        differs = [rank for rank, (other, _) in enumerate(told) if other.tensors_sha256 != channel.tensors_sha256]
        if differs:
            raise ModelMismatchError(f"Rank {differs[0]} publishes other names, dtypes or shapes than rank 0.")
        check_coverage(channel.specs, held)
        resumed = self.resumed(first.ranges)
        if resumed is not None:
            return Begun(channel, held, resumed, True, resumed.advance(first.stream(), "keep", peers.rank), None)
        if self.initial is None or not refers:
            return Begun(channel, held, first, False, {}, None)
        reference, changes = refer(peers, self.initial, first)
        if changes:
            logger.warning("%d tensors are not as in %s; they follow as a delta.", len(changes), reference)
        return Begun(channel, held, first, False, changes, reference)

    def resumed(self, ranges: Mapping[str, Range]) -> Shadow | None:
        """These ranges of the version that is resumed, once; None if there is none, or if it cannot be read."""
        if not self._resumes:
            return None
        self._resumes, start = False, self.start
        wanted = ranges if self._peers.size > 1 else None
        shadow, problem = attempt(lambda: read_shadow(self._reader, start, wanted, self._saved))
        damage = problem if isinstance(problem, FormatError | ChainError | ApplyError) else None
        added = 0 if shadow is None else sum(shadow.fingerprints.values())
        damaged, total = self._peers.agree(None if damage else problem, damage is not None, added)
        if damaged or fingerprint.to_hex(total) != start.way[-1].record.fingerprint:
            why = damage or "on another rank, or it has other bits than it promises"
            logger.warning("Version %s cannot be read: %s The next version has full weights.", start.end, why)
            return None
        return shadow


def check_sharded(settings: PublisherSettings, retention: Retention, shadow: str | Path | None) -> None:
    """Refuse what no rank of a sharded trainer can do.

    Raises:
        ConfigError: and why.
    """
    if shadow is not None:
        raise ConfigError("A sharded trainer cannot resume from a saved shadow; without it each rank reads the channel.")
    if settings.codec == "context":
        raise ConfigError("codec='context' needs whole tensors, which no rank of a sharded trainer has; use 'packed'.")
    if retention.fold_every:
        raise ConfigError("A sharded trainer writes no folds; leave fold_every at 0 and run `deltasync fold`.")
