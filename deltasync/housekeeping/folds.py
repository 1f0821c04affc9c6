"""Write a fold: one delta over several versions, for replicas that catch up."""

from __future__ import annotations

import itertools
import logging

from deltasync import codec, fingerprint, layout, manifest, signing
from deltasync.bits import bits_of
from deltasync.errors import ConfigError, MissingVersionError, ObjectExistsError
from deltasync.housekeeping.survey import Progress, fold_keys, now, quiet, read_fold
from deltasync.kernels import cpu
from deltasync.manifest import FileRef, Fold
from deltasync.reader import ChannelReader
from deltasync.replica import Replica
from deltasync.signing import Signer

logger = logging.getLogger(__name__)


def write_fold(
    reader: ChannelReader,
    base: int,
    version: int,
    *,
    codec_name: str = "packed",
    signer: Signer | None = None,
    progress: Progress = quiet,
) -> Fold:
    """Store the fold of the deltas from one version to another; if the channel has it already, nothing is written.

    It brings a replica in host memory to both versions and compares their bits, which gives every codec what it needs, also
    across anchors and dense tensors. Holds the weights twice.

    Raises:
        ConfigError: `base` is not before `version`, or the channel is signed and there is no `signer`.
        UnsupportedFormatError: there is no such codec.
        MissingVersionError: one of the two is not in the channel.
    """
    if not 1 <= base < version:
        raise ConfigError(f"A fold leads from a version to a later one, not from {base} to {version}.")
    encoder = codec.get(codec_name).encoder()
    head, stored = reader.head(), reader.versions()
    signing.require_signer(signer, reader.signed)
    for end in (base, version):
        if end > head.version or end not in stored:
            raise MissingVersionError(
                f"Version {end} is not in the channel (not published yet, or forgotten), so no fold can begin or end there. "
                "`deltasync log` lists the versions that are."
            )
    for key in fold_keys(reader, layout.fold_dir(base, version)):
        return read_fold(reader, key)
    replica = Replica(reader)
    progress("weights", 0, 2)
    replica.sync(base)
    old = {name: bits_of(tensor).copy() for name, tensor in replica.state_dict().items()}
    progress("weights", 1, 2)
    replica.sync(version)
    progress("weights", 2, 2)
    fingerprints = replica.fingerprints
    changed = 0
    for done, (name, tensor) in enumerate(replica.state_dict().items(), start=1):
        new_N = bits_of(tensor)
        index_K, step_K = cpu.diff(old.pop(name), new_N)
        if index_K.size:
            encoder.add(reader.specs[name], index_K, step_K, new_N, fingerprint.to_hex(fingerprints[name]))
            changed += index_K.size
        progress("tensors", done, len(reader.specs))
    payload = encoder.finish(version, base).to_bytes() if changed else None
    return store_fold(reader, base, version, codec_name=codec_name, changed=changed, payload=payload, signer=signer)


def store_fold(
    reader: ChannelReader,
    base: int,
    version: int,
    *,
    codec_name: str,
    changed: int,
    payload: bytes | None,
    signer: Signer | None = None,
) -> Fold:
    """Store an encoded fold: its payload, then its document. After return it exists; if it raised, it does not, and what was
    stored of it is garbage for `prune`.

    Args:
        reader: The channel.
        base: Version it starts from.
        version: Version it leads to.
        codec_name: The payload's.
        changed: Elements that differ.
        payload: None if none differ.
        signer: What its document is signed with; None for a channel without signatures.
    """
    store = reader.store
    sha256 = {end: manifest.sha256_hex(store.read(layout.manifest(end))) for end in (base, version)}
    for attempt in itertools.count():
        directory = layout.fold_dir(base, version, attempt)
        key = f"{directory}/{layout.delta_part(1, 1)}"
        files = []
        if payload is not None:
            try:
                store.create(key, payload)
            except ObjectExistsError:
                continue  # left by a dead writer: never used, not even if it is the same, because `prune` may delete it
            files = [FileRef(key=key, bytes=len(payload), sha256=manifest.sha256_hex(payload))]
        fold = Fold(
            format=manifest.FORMAT,
            run_id=reader.channel().run_id,
            base_version=base,
            base_manifest_sha256=sha256[base],
            version=version,
            manifest_sha256=sha256[version],
            codec=codec_name,
            changed=changed,
            files=files,
            created_at=now(),
        )
        try:
            document = layout.fold_document(directory)
            store.create(document, signing.encode(fold, document, signer))
        except ObjectExistsError:  # only a fold without payload gets here
            continue
        logger.info("folded base=%d version=%d changed=%d payload_bytes=%d", base, version, changed, fold.payload_bytes)
        return fold
    raise AssertionError("unreachable")
