"""The files beside an anchor's weights: config, tokenizer, templates.

Manifests name their digests. Older ones do not; there the files are what a listing finds, unless keys are trusted: then
what no signed document names is not taken.
"""

from __future__ import annotations

from deltasync.anchor import INDEX, WEIGHTS
from deltasync.errors import ObjectMissingError
from deltasync.manifest import DOCUMENT_BYTES, Anchor
from deltasync.reader import ChannelReader


def names(reader: ChannelReader, anchor: Anchor) -> list[str]:
    """Names of the files in the anchor's folder; costs a listing if its manifest does not tell."""
    folder = f"{anchor.directory}/"
    if _listed(reader, anchor):
        keys = [info.key for info in reader.store.list(folder)]
    else:
        keys = [file.key for file in anchor.companions or []]
    return [key.removeprefix(folder) for key in keys if not key.endswith((*WEIGHTS, INDEX))]


def read(reader: ChannelReader, anchor: Anchor, name: str) -> bytes:
    """One of the files.

    Raises:
        ObjectMissingError: the anchor has no such file.
        CorruptDataError, MissingVersionError: it is not what the manifest names.
    """
    key = f"{anchor.directory}/{name}"
    if _listed(reader, anchor):
        return reader.store.read(key, DOCUMENT_BYTES)
    for file in anchor.companions or []:
        if file.key == key:
            return reader.fetch(file)
    raise ObjectMissingError(f"{key} is not one of the anchor's files.")


def _listed(reader: ChannelReader, anchor: Anchor) -> bool:
    return anchor.companions is None and reader.trusted is None
