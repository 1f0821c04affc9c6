"""Write shortcuts: compactions (one delta over several versions, for replicas that catch up) and announced
anchors.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from deltasync import codec
from deltasync.channel import anchors, keys, record, signing
from deltasync.channel.documents import Anchor, DeltaFiles, File, VersionId, sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.channel.shortcuts import shortcut
from deltasync.channel.signing import Signer
from deltasync.codec.base import Encoded
from deltasync.errors import ConfigError, CorruptDataError, FormatError, MissingVersionError
from deltasync.following import Replica
from deltasync.kernels import native
from deltasync.live import model_fingerprint
from deltasync.ops.scan import progressed
from deltasync.publish.encode import encode
from deltasync.tensors import fingerprint
from deltasync.tensors.bits import bits_of
from deltasync.tensors.delta import joined, of_tensor

logger = logging.getLogger(__name__)


def write_compaction(
    reader: ChannelReader,
    base: int,
    version: int,
    *,
    codec_name: str = "packed",
    signer: Signer | None = None,
) -> StoredRecord:
    """Store the compaction from version `base` to `version`, unless the channel has it, and return it.

    The bits of both versions are compared, which works for every codec, and across anchors and dense tensors.
    The encoded bytes are decoded again before they are stored. Needs memory for two copies of the weights.
    """
    if not 1 <= base < version:
        raise ConfigError(
            f"A compaction needs a base before its version, not base {base} and version {version}."
        )
    codec.get(codec_name)  # refuses a codec that there is not
    reader.channel()
    signing.require_signer(signer, reader.signed)
    try:
        start, end = (reader.numbered(number).version for number in (base, version))
    except MissingVersionError as error:
        raise MissingVersionError(
            f"The compaction cannot be written: {error} `deltasync log` lists the versions of the channel."
        ) from error
    for span, info in reader.compactions():
        if (span.base, span.version) == (base, version):
            with contextlib.suppress(FormatError, MissingVersionError):
                found = reader.stored(info.key)
                if (found.base, found.version) == (start, end):
                    return found
    replica = Replica(reader)
    progressed("weights", 0, 2)
    replica.sync(base)
    old = {name: bits_of(tensor).copy() for name, tensor in replica.state_dict().items()}
    progressed("weights", 1, 2)
    replica.sync(version)
    progressed("weights", 2, 2)
    new = {name: bits_of(tensor) for name, tensor in replica.state_dict().items()}
    layout, pieces = reader.layout, []
    for done, (name, new_N) in enumerate(new.items(), start=1):
        index_K, step_K = native.diff(old[name], new_N)
        if index_K.size:
            pieces.append(of_tensor(layout, name, index_K, step_K))
        progressed("tensors", done, len(reader.specs))
    payload, changed = None, 0
    if pieces:
        changes = joined(pieces)
        changed = changes.changed
        payload, _ = encode(
            codec_name, changes, lambda name: (new[name], 0), replica.fingerprints, version, base
        )
    delta = DeltaFiles(codec=codec_name, changed=changed)
    return put_shortcut(
        reader,
        encode_shortcut(
            reader, end, payload, replica.fingerprints, signer, keys.new_author(), base=start, delta=delta
        ),
    )


def put_shortcut(reader: ChannelReader, stored: StoredRecord) -> StoredRecord:
    """Store a compaction or announcement. If this raises, it may have been stored, which does no harm."""
    assert stored.data is not None
    reader.store.put(stored.key, stored.data)
    logger.info("stored key=%s bytes=%d", stored.key, stored.size)
    return stored


def encode_shortcut(
    reader: ChannelReader,
    version: VersionId,
    payload: Encoded | None,
    fingerprints: Mapping[str, int],
    signer: Signer | None,
    author: str,
    **fields: Any,
) -> StoredRecord:
    """Encode a shortcut with these `fields` (`shortcut`). `fingerprints` belong to the version's
    tensors.
    """
    total = fingerprint.to_hex(model_fingerprint(fingerprints))
    document, key = shortcut(reader.channel().run_id, version, author, total, **fields)
    return record.encode_checked(document, key, payload, signer, reader.channel(), reader.trusted)


def write_anchor(
    reader: ChannelReader,
    replica: Replica,
    model_files: Mapping[str, bytes],
    *,
    signer: Signer | None,
) -> StoredRecord:
    """Store the weights of a replica as an anchor with `model_files`, and announce it if its files decode to
    them.
    """
    version, author = replica.identity, keys.new_author()
    assert version is not None
    folder, tensors = keys.anchor_folder(version.version, author), replica.state_dict()
    files: list[File] = []
    extra: list[File] = []
    made = anchors.weight_files(tensors, replica.fingerprints)
    for name, data in itertools.chain(made, sorted(model_files.items())):
        weights = name.endswith(anchors.WEIGHTS)
        for tensor, bits_N, _ in anchors.read_weights(data, reader.specs) if weights else ():
            if not np.array_equal(bits_N, bits_of(tensors[tensor])):
                raise CorruptDataError(f"{folder}/{name} has wrong bits for {tensor}. It was not stored.")
        reader.store.put(f"{folder}/{name}", data)
        (files if weights else extra).append(
            File(key=f"{folder}/{name}", bytes=len(data), sha256=sha256_hex(data))
        )
        progressed("files", len(files) + len(extra), len(files) + len(extra))
    anchor = Anchor(directory=folder, files=files, model_files=extra)
    stored = encode_shortcut(reader, version, None, replica.fingerprints, signer, author, anchor=anchor)
    return put_shortcut(reader, stored)
