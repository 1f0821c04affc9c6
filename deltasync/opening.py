"""What a publisher finds when it opens a channel."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from deltasync import layout, manifest, signing
from deltasync.errors import (
    ChannelInUseError,
    ConfigError,
    FormatError,
    MissingVersionError,
    ModelMismatchError,
    NotPublishedError,
)
from deltasync.manifest import Channel, Head, Link
from deltasync.reader import ChannelReader
from deltasync.replica import Replica
from deltasync.signing import Signer
from deltasync.upload import Tip

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """A channel that is to be written.

    Attributes:
        channel: None if there is none yet.
        head: None if there is no version yet.
        chain: See `Manifest.chain_onward`.
        tip: Where it stands.
    """

    channel: Channel | None = None
    head: Head | None = None
    chain: list[Link] = dataclasses.field(default_factory=list)
    tip: Tip = dataclasses.field(default_factory=Tip)


def open_channel(reader: ChannelReader, dtype: str, resume: bool, signer: Signer | None) -> Opened:
    """Look at a channel; roll it forward if it is to be continued.

    Raises:
        ChannelInUseError: it holds a run, and is not to be continued, or is of another dtype.
        ConfigError: it is signed, and there is no `signer`.
    """
    try:
        channel = reader.channel()
    except NotPublishedError:
        return Opened()
    if not resume:
        raise ChannelInUseError(
            f"{reader.store.url} already holds run {channel.run_id}. Pass resume=True to continue it, or use another URL."
        )
    if channel.dtype != dtype:
        raise ChannelInUseError(f"Run {channel.run_id} is published in {channel.dtype}, not in {dtype}.")
    signing.require_signer(signer, reader.signed)
    head = _roll_forward(reader, signer)
    if head is None:
        return Opened(channel)
    try:
        steps = reader.plan(None, head)
        newest = reader.manifest(head.version, head.manifest_sha256)
        by_reference = reader.manifest(newest.anchor_version).reference is not None
    except (FormatError, MissingVersionError) as error:
        logger.warning("Version %d cannot be read: %s The next version has full weights.", head.version, error)
        return Opened(channel, head, [], Tip(head.version))
    chain_bytes = sum(step.payload_bytes for step in steps if not step.use_anchor)
    tip = Tip(head.version, newest.anchor_version, chain_bytes, by_reference)
    return Opened(channel, head, newest.chain_onward(head.manifest_sha256), tip)


def replica_at(reader: ChannelReader, version: int, saved: str | Path | None) -> Replica:
    """A replica at a version.

    Args:
        reader: The channel's.
        version: Which.
        saved: A directory with a shadow to start from, if it is of the model and a version that is still known.

    Raises:
        StoreError, ChainError, FormatError, ApplyError: as `Replica.sync`.
    """
    replica = Replica(reader)
    if saved is not None:
        try:
            logger.info("saved shadow version=%s", replica.load(saved))
        except (ConfigError, FormatError, MissingVersionError, ModelMismatchError) as error:
            logger.warning("The saved shadow is not used: %s", error)
    replica.sync(version)
    return replica


def _roll_forward(reader: ChannelReader, signer: Signer | None) -> Head | None:
    """Head, moved to the newest version whose manifest is stored, where a publisher died before moving it.

    None in an empty channel. The newest one is complete without those between: after a lost version comes an anchor.
    """
    # Listed before head is read: what a publisher that is alive stores meanwhile is not taken for a dead one's.
    version = max(reader.versions(), default=0)
    try:
        head: Head | None = reader.head()
    except NotPublishedError:
        head = None
    if version <= (0 if head is None else head.version):
        return head
    sha256 = manifest.sha256_hex(reader.store.read(layout.manifest(version), manifest.DOCUMENT_BYTES))
    found = reader.manifest(version, sha256)
    head = Head(format=manifest.FORMAT, run_id=found.run_id, version=version, manifest_sha256=sha256)
    reader.store.replace(layout.HEAD, signing.encode(head, layout.HEAD, signer))
    logger.warning("version %d was complete but not named by head; rolled forward", version)
    return head
