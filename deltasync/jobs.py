"""ENCODE: the next version of a channel, as a job for the uploader."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

from deltasync import anchor, codec, fingerprint, layout, manifest
from deltasync.bits import tensor_of
from deltasync.collect import Spool, collect_anchor
from deltasync.config import PublisherSettings, Retention
from deltasync.housekeeping.survey import now
from deltasync.manifest import Anchor, Channel, Delta, Manifest, Reference
from deltasync.peers import Peers, Range, attempt
from deltasync.shadow import Shadow, fold_changes
from deltasync.types import Patch, TensorSpec
from deltasync.upload import EncodedFold, Job, Tip
from deltasync.writer import Contents

_ANCHOR_EVERY = 100
_OPENED = Tip(version=1, anchor_version=1, by_reference=True)


class JobMaker:
    """Encodes versions of one channel.

    Args:
        settings: The publisher's.
        retention: The publisher's, for its folds.
        peers: All ranks; they make the same jobs at the same time, each with its own part.
        model_files: What lies beside the weights of an anchor.

    Attributes:
        channel: None before the first stream.
        channel_stored: Whether it is known to be in the store.
        specs: The channel's.
        held: Ranges of each rank.
        shadow: What is encoded.
        fingerprints: Of whole tensors.
        reference: What version 1 is to refer to, if it is to.
        since: What leads from a version to the newest one, for the next fold.
    """

    def __init__(
        self, settings: PublisherSettings, retention: Retention, peers: Peers, model_files: Mapping[str, bytes]
    ) -> None:
        self.settings = settings
        self._retention = retention
        self._peers = peers
        self._model_files = model_files
        self._serial = 0
        self.channel: Channel | None = None
        self.channel_stored = False
        self.specs: dict[str, TensorSpec] = {}
        self.held: Sequence[Mapping[str, Range]] = []
        self.shadow: Shadow | None = None
        self.fingerprints: dict[str, int] = {}
        self.reference: Reference | None = None
        self.since: tuple[int, int, dict[str, Patch]] | None = None

    def job(self, base: Tip, waiting: Job | None, changes: dict[str, Patch], step: int | None) -> Job:
        """The next version, or the one that still waits with these changes folded in."""
        assert self.channel is not None
        self._serial += 1
        opening = None
        if self.reference is not None and base.version == 0:
            (differing,) = self._peers.agree(None, len(changes))
            waiting = self._opening_job(None if differing else step)
            if not differing:
                return waiting
        if waiting is None:
            coalesced, uploaded = 1, Future[None]()
        elif waiting.manifest.reference is not None:
            base, coalesced, uploaded, opening = waiting.tip, 1, waiting.uploaded, waiting
        else:
            base, coalesced, uploaded = waiting.base, waiting.manifest.coalesced + 1, waiting.uploaded
            opening = waiting.opening
            changes = fold_changes(waiting.patches, changes)
        weight_bytes = sum(spec.element_count * spec.item_bytes for spec in self.specs.values())
        full = base.anchor_version == 0
        version = base.version + 1
        encoded, problem = attempt(lambda: [] if full else self._encode(changes, version, base.version))
        delta_files = encoded or []
        changed, payload_bytes = self._peers.agree(
            problem, sum(patch.changed for patch in changes.values()), sum(len(data) for _, data in delta_files)
        )
        chain_bytes = base.chain_bytes + payload_bytes
        anchored = full or version - base.anchor_version >= self._anchor_every(base) or chain_bytes > weight_bytes
        spool, anchor_files, anchor_bytes = self._anchor_files() if anchored else (None, [], 0)
        tip = Tip(version, version)
        if not anchored:
            tip = Tip(version, base.anchor_version, chain_bytes, base.by_reference)
        delta = None
        if not full:
            # Digest and files are known once they are uploaded.
            delta = Delta(
                base_version=base.version,
                base_manifest_sha256="",
                codec=self.settings.codec,
                changed=changed,
                files=[],
            )
        return Job(
            serial=self._serial,
            base=base,
            tip=tip,
            patches=changes,
            channel=self.channel if full and not self.channel_stored else None,
            manifest=Manifest(
                format=manifest.FORMAT,
                run_id=self.channel.run_id,
                version=version,
                kind="anchor" if anchored else "delta",
                step=step,
                created_at=now(),
                total=sum(spec.element_count for spec in self.specs.values()),
                fingerprint=fingerprint.to_hex(sum(self.fingerprints.values())),
                anchor_version=tip.anchor_version,
                delta=delta,
                anchor=Anchor(directory="", files=[]) if anchored else None,
                coalesced=coalesced,
            ),
            delta_files=delta_files,
            anchor_files=anchor_files,
            payload_bytes=anchor_bytes if full else payload_bytes,
            anchor_bytes=anchor_bytes,
            uploaded=uploaded,
            opening=opening,
            spool=spool,
        )

    def _opening_job(self, step: int | None) -> Job:
        """Version 1: the checkpoint that everybody has, by reference."""
        assert self.channel is not None and self.reference is not None
        return Job(
            serial=self._serial,
            base=Tip(),
            tip=_OPENED,
            patches={},
            channel=None if self.channel_stored else self.channel,
            manifest=Manifest(
                format=manifest.FORMAT,
                run_id=self.channel.run_id,
                version=1,
                kind="anchor",
                step=step,
                created_at=now(),
                total=sum(spec.element_count for spec in self.specs.values()),
                fingerprint=fingerprint.to_hex(sum(int(digest, 16) for digest in self.reference.fingerprints.values())),
                anchor_version=1,
                anchor=Anchor(directory="", files=[], reference=self.reference),
                requires=[manifest.REFERENCE],
            ),
            delta_files=[],
            anchor_files=[],
            payload_bytes=0,
            anchor_bytes=0,
            uploaded=Future(),
        )

    def _anchor_every(self, base: Tip) -> int:
        """After how many versions an anchor is due by their count.

        By default never after a reference: a late joiner has that already, and pays for the deltas alone. Once these are
        more bytes than the weights, an anchor is the cheaper way for it too, so that rule stays.
        """
        if self.settings.anchor_every is not None:
            return self.settings.anchor_every
        return sys.maxsize if base.by_reference else _ANCHOR_EVERY

    def fold(self, job: Job, changes: dict[str, Patch]) -> EncodedFold | None:
        """Add the changes to those that the next fold will cover; the fold, if it is complete with this version."""
        every, version = self._retention.fold_every, job.manifest.version
        if not every:
            return None
        if self.since is None or job.manifest.delta is None:
            self.since = version, version, {}
            return None
        base, upto, patches = self.since
        if version > upto and upto - base >= every:  # unless more changes join a version that still waits
            base, patches = upto, {}
        patches = fold_changes(patches, changes)
        fold = None
        if version - base >= every:
            files = self._encode(patches, version, base)
            changed = sum(patch.changed for patch in patches.values())
            fold = EncodedFold(base, self.settings.codec, changed, files[0][1] if files else None)
        self.since = base, version, patches
        return fold

    def _encode(self, changes: dict[str, Patch], version: int, base_version: int) -> list[tuple[str, bytes]]:
        """The payload files of this rank's part of a delta; none if nothing changed."""
        if not changes:
            return []
        assert self.shadow is not None
        encoder = codec.get(self.settings.codec).encoder()
        for name, patch in changes.items():
            assert patch.index_K is not None
            digest = fingerprint.to_hex(self.fingerprints[name])
            new, (start, _) = self.shadow.bits[name], self.shadow.ranges[name]
            encoder.add(self.specs[name], patch.index_K, patch.data, new, digest, start)
        part = layout.delta_part(self._peers.rank + 1, self._peers.size)
        return [(part, encoder.finish(version, base_version).to_bytes())]

    def _anchor_files(self) -> tuple[Spool | None, list[tuple[str, Contents]], int]:
        """The checkpoint directory of the shadow, and the bytes of its weights: a copy, in memory until it is uploaded.

        Of a sharded trainer it lies on the first rank's disk.
        """
        assert self.shadow is not None
        weights: list[tuple[str, Contents]]
        if self._peers.size > 1:
            spool, weights, weight_bytes = collect_anchor(
                self._peers, self.shadow, self.specs, self.held, self.fingerprints, self.settings.shard_bytes
            )
        else:
            files = list(self.weight_files())
            spool, weights = None, [*files]
            weight_bytes = sum(len(data) for name, data in files if name != anchor.INDEX)
        return spool, [*self._model_files.items(), *weights], weight_bytes

    def weight_files(self) -> Iterator[tuple[str, bytes]]:
        """Those of a rank that is alone."""
        assert self.shadow is not None
        tensors = {name: tensor_of(self.shadow.bits[name], spec) for name, spec in self.specs.items()}
        return anchor.weight_files(tensors, self.shadow.fingerprints, self.settings.shard_bytes)
