"""Find out which version weights are that came from somewhere else."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from deltasync.channel import keys
from deltasync.channel.documents import VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import FormatError, MissingVersionError

_COMPARED = 8  # of the newest versions, and of the newest anchors, that are compared with loaded weights


def identify(reader: ChannelReader, newest: VersionId, total: int) -> StoredRecord | None:
    """Find the version whose model has the fingerprint `total`, among the newest versions and those with full
    weights.
    """
    for stored in itertools.chain(
        itertools.islice(reader.back_from(newest), _COMPARED), _with_full_weights(reader)
    ):
        if stored.record.fingerprint == f"{total:016x}":
            return reader.record(stored.version) if stored.is_shortcut else stored
    return None


def tied(reader: ChannelReader) -> dict[str, str]:
    """Return the tensors that the channel's first checkpoint has under another name only."""
    references = (stored.record.reference for stored in _with_full_weights(reader))
    return next((reference.tied for reference in references if reference is not None), {})


def _with_full_weights(reader: ChannelReader) -> Iterator[StoredRecord]:
    """Yield the newest announced anchors, then the first record."""
    announced = sorted(((span.version, info.key) for span, info in reader.announcements()), reverse=True)
    first = [info.key for _, info in reader.slots(keys.folder(1))[:1]]
    for key in [*(key for _, key in announced[:_COMPARED]), *first]:
        with contextlib.suppress(MissingVersionError, FormatError):
            yield reader.stored(key)
