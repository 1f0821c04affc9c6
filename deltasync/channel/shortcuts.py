"""Shortcuts outside of the log: a compaction, or the announcement of an anchor."""

from __future__ import annotations

from typing import Any

from deltasync.channel import documents, keys
from deltasync.channel.documents import Record, VersionId


def shortcut(
    run_id: str, version: VersionId, author: str, fingerprint: str, **fields: Any
) -> tuple[Record, str]:
    """Return the document of a shortcut to a version, and its key.

    `fields` are the `base` and `delta` of a compaction, or the announced `anchor`. `fingerprint` is the
    version's.
    """
    document = Record(
        run_id=run_id,
        kind="announcement" if "anchor" in fields else "compaction",
        version=version.version,
        epoch=version.epoch,
        sha256=version.sha256,
        created_at=documents.now(),
        fingerprint=fingerprint,
        **fields,
    )
    if document.base is None:
        return document, keys.announcement(version.version, author)
    return document, keys.compaction(document.base.version, version.version, author)
