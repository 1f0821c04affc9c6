"""What a publisher finds when it opens a channel, and the shadow that it goes on from."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from deltasync.channel import documents, plan, signing
from deltasync.channel.documents import Channel, Version
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.config import PublisherSettings
from deltasync.errors import ChainError, ConfigError, FormatError, ModelMismatchError
from deltasync.follow import Replica
from deltasync.publish.log import Log
from deltasync.publish.opening import open_channel
from deltasync.publish.shadow import Shadow
from deltasync.publish.upload import Since
from deltasync.ranks.peers import Range
from deltasync.stores import Store
from deltasync.types import TensorSpec

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
