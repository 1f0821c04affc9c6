"""The files beside an anchor's weights: config, tokenizer, templates.

Manifests name their digests. Older ones do not; there the files are what a listing finds, unless keys are trusted: then
what no signed document names is not taken.
"""

from __future__ import annotations

from collections.abc import Iterable

from deltasync.anchor import INDEX, WEIGHTS
from deltasync.errors import CorruptDataError, ObjectMissingError
from deltasync.manifest import DOCUMENT_BYTES, Anchor, FileRef
from deltasync.reader import ChannelReader

MOST_FILES = 1000
MOST_BYTES = 1 << 30
"""Of all of an anchor's files together; one has `DOCUMENT_BYTES` at most."""


def names(reader: ChannelReader, anchor: Anchor) -> list[str]:
    """Names of the files in the anchor's folder; costs a listing if its manifest does not tell.

    Raises:
        CorruptDataError: they are more, or larger, than files beside weights are.
    """
    folder = f"{anchor.directory}/"
    if _listed(reader, anchor):
        sizes = {info.key: info.bytes for info in reader.store.list(folder)}
    else:
        sizes = {file.key: file.bytes for file in named(anchor)}
    sizes = {key: size for key, size in sizes.items() if not key.endswith((*WEIGHTS, INDEX))}
    _check(anchor, sizes.values())
    return [key.removeprefix(folder) for key in sizes]


def named(anchor: Anchor) -> list[FileRef]:
    """The files that the anchor's manifest names.

    Raises:
        CorruptDataError: as of `names`.
    """
    files = anchor.companions or []
    _check(anchor, [file.bytes for file in files])
    return files


def read(reader: ChannelReader, anchor: Anchor, name: str) -> bytes:
    """One of the files.

    Raises:
        ObjectMissingError: the anchor has no such file.
        CorruptDataError, MissingVersionError: it is not what the manifest names, or too large.
    """
    key = f"{anchor.directory}/{name}"
    if _listed(reader, anchor):
        return reader.store.read(key, DOCUMENT_BYTES)
    for file in named(anchor):
        if file.key == key:
            return reader.fetch(file)
    raise ObjectMissingError(f"{key} is not one of the anchor's files.")


def _check(anchor: Anchor, sizes: Iterable[int]) -> None:
    found = list(sizes)
    if len(found) > MOST_FILES or sum(found) > MOST_BYTES or max(found, default=0) > DOCUMENT_BYTES:
        raise CorruptDataError(
            f"{len(found):,} files with {sum(found):,} bytes lie beside the weights in {anchor.directory}; there may be "
            f"{MOST_FILES:,} with {MOST_BYTES:,} bytes, and {DOCUMENT_BYTES:,} in one."
        )


def _listed(reader: ChannelReader, anchor: Anchor) -> bool:
    return anchor.companions is None and reader.trusted is None
