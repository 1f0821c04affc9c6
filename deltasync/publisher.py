"""DETECT and ENCODE: turn a stream of tensors into the next version of a channel.

The shadow holds the bits last handed to the uploader. `publish` drains the stream, diffs it against the shadow and
encodes, all in the caller's thread; the uploader does the rest in the background. If it falls behind, the version that
still waits is folded together with the next one, so that memory stays bounded and the trainer never waits for the network.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from deltasync import anchor, checkpoint, codec, fingerprint, layout, manifest
from deltasync.bits import bits_of, cast, spec_of, tensor_of
from deltasync.config import PublisherSettings, Retention
from deltasync.errors import (
    ChannelInUseError,
    ConfigError,
    FormatError,
    MissingVersionError,
    ModelMismatchError,
    NotPublishedError,
    PublishError,
)
from deltasync.fold import fold
from deltasync.keeper import Keeper
from deltasync.kernels import cpu
from deltasync.manifest import Anchor, Channel, Delta, Head, Link, Manifest, Reference
from deltasync.reader import ChannelReader
from deltasync.replica import Replica
from deltasync.stores import Store, open_store
from deltasync.types import Patch, TensorSpec, check_specs
from deltasync.upload import EncodedFold, Job, Tip, Uploader

logger = logging.getLogger(__name__)

_ANCHOR_EVERY = 100
_OPENED = Tip(version=1, anchor_version=1, by_reference=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receipt:
    """What `publish` did, and a handle on the upload.

    Attributes:
        version: The version that carries these weights. A later publish joins it if its upload has not begun by then.
        kind: `anchor` if the version has full weights, else `delta`.
        step: The trainer's step, as given.
        changed: Elements whose bits differ from the version before; all of them in the first version.
        total: Elements of all tensors.
        payload_bytes: Bytes of the delta, or of the weights in the first version.
        anchor_bytes: Bytes of the full weights stored with the version, 0 for a mere delta.
        encode_s: Seconds from the first tensor of the stream to the finished payload.
    """

    version: int
    kind: str
    step: int | None
    changed: int
    total: int
    payload_bytes: int
    anchor_bytes: int
    encode_s: float
    _job: Job = dataclasses.field(repr=False)

    @property
    def bits_per_changed(self) -> float | None:
        """Payload bits per changed element; None if nothing changed."""
        return 8 * self.payload_bytes / self.changed if self.changed else None

    @property
    def changed_fraction(self) -> float:
        """Changed elements of all elements."""
        return self.changed / self.total if self.total else 0.0

    @property
    def done(self) -> bool:
        """Whether the upload has ended, well or not."""
        return self._job.uploaded.done()

    def when_done(self, action: Callable[[], None]) -> None:
        """Call `action` once the upload has ended, well or not; in the thread that ends it."""
        self._job.uploaded.add_done_callback(lambda _: action())

    def wait(self, timeout_s: float | None = None) -> Self:
        """Block until head names this version or a later one.

        Raises:
            TimeoutError: still uploading; the upload goes on.
            PublishError: the version did not become visible, and why.
        """
        try:
            self._job.uploaded.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"Version {self.version} is still being uploaded after {timeout_s} s.") from None
        return self


class Publisher:
    """Writes one channel. Call `publish` from one thread.

    Args:
        channel: URL of the channel, or an opened store.
        codec, anchor_every, dtype, shard_bytes, retries, retry_delay_s: See `PublisherSettings`.
        model_files: What makes an anchor a checkpoint: a directory with config.json, tokenizer and so on, or those files'
            bytes by name. Without it anchors hold weights only.
        initial: The checkpoint that trainer and replicas start from: a directory, or a model on the Hub as
            `namespace/name@revision`. The first version of a new channel then is a reference to it, and uploads no weights;
            if the first stream has other bits, these are the second version, a delta.
        resume: Continue the run that the channel holds; without it a used channel is refused.
        shadow: A directory that `save_shadow` wrote, to resume with fewer downloads; held to its fingerprint, not needed.
        retention: How to look after the channel in the background; from the environment if None.

    Raises:
        ChannelInUseError: the channel holds a run and `resume` was not given.
        ConfigError: a setting is wrong.

    Example:
        >>> with Publisher("file:///data/run") as publisher:
        ...     receipt = publisher.publish(model.state_dict().items(), step=1)
        ...     receipt.wait(timeout_s=60).version
        1
    """

    def __init__(
        self,
        channel: str | Store,
        *,
        codec: str | None = None,
        anchor_every: int | None = None,
        dtype: str | None = None,
        shard_bytes: int | None = None,
        retries: int | None = None,
        retry_delay_s: float | None = None,
        model_files: str | Path | Mapping[str, bytes] | None = None,
        initial: str | Path | None = None,
        resume: bool = False,
        shadow: str | Path | None = None,
        retention: Retention | None = None,
    ) -> None:
        self.settings = PublisherSettings.from_env(
            codec=codec,
            anchor_every=anchor_every,
            dtype=dtype,
            shard_bytes=shard_bytes,
            retries=retries,
            retry_delay_s=retry_delay_s,
        )
        self.store = open_store(channel) if isinstance(channel, str) else channel
        if isinstance(model_files, str | Path):
            model_files = anchor.companion_files(Path(model_files))
        self._model_files = dict(model_files) if model_files is not None else {}
        for name in self._model_files:
            layout.check_key(name)
        self._channel: Channel | None = None
        self._specs: dict[str, TensorSpec] = {}
        self._shadow: dict[str, np.ndarray] = {}
        self._fingerprints: dict[str, int] = {}
        self._tip = Tip()
        self._last: Receipt | None = None
        self._closed = False
        self._channel_stored = False
        self._retention = Retention.from_env() if retention is None else retention
        # What leads from a version to the newest one, for the next fold.
        self._since: tuple[int, int, dict[str, Patch]] | None = None
        head, links = self._open(resume, shadow)
        self._initial = None if initial is None or head is not None else checkpoint.load(checkpoint.find(initial))
        self._reference: Reference | None = None
        self._keeper = Keeper(self.store, self._retention)
        self._uploader = Uploader(self.store, self.settings, head, links, self._published)

    @property
    def run_id(self) -> str | None:
        """The run that this channel holds; None before the first publish to a new one."""
        return None if self._channel is None else self._channel.run_id

    @property
    def version(self) -> int:
        """The newest version handed to the uploader, 0 before the first."""
        return self._tip.version

    def publish(self, named_tensors: Iterable[tuple[str, torch.Tensor]], step: int | None = None) -> Receipt:
        """Publish the weights as the next version; the upload goes on in the background.

        Args:
            named_tensors: Every tensor of the model, each once, of any dtype, device and stride; floating ones are cast to
                the served dtype. Read completely and not kept: the tensors may change as soon as this returns.
            step: The trainer's step, stored as metadata.

        Returns:
            The receipt; `receipt.wait()` blocks until the version is visible.

        Raises:
            ModelMismatchError: names, shapes or dtypes are not the channel's. Nothing is published and the shadow is as
                before, as with any error that the stream or the encoder raises.
            HeadConflictError: another publisher writes to this channel.
        """
        if self._closed:
            raise ConfigError("This publisher is closed.")
        self._recover()
        before = time.perf_counter()
        tip, fingerprints = self._tip, dict(self._fingerprints)
        with torch.no_grad():
            changes = self._advance_shadow(named_tensors)
        waiting = self._uploader.take_waiting()
        try:
            job = self._next_job(waiting, changes, step)
            job.fold = self._next_fold(job, changes)
        except BaseException:
            if waiting is not None:
                self._uploader.submit(waiting)
            self._tip = tip
            self._retreat_shadow(changes, fingerprints)
            raise
        receipt = self._receipt(job, time.perf_counter() - before)
        self._uploader.submit(job)
        self._last = receipt
        logger.info(
            "encoded version=%d kind=%s step=%s changed=%d payload_bytes=%d encode_s=%.3f",
            receipt.version,
            receipt.kind,
            step,
            receipt.changed,
            receipt.payload_bytes,
            receipt.encode_s,
        )
        return receipt

    def flush(self, timeout_s: float | None = None) -> None:
        """Block until everything published so far is visible.

        Raises:
            TimeoutError, PublishError: as `Receipt.wait` of the last publish.
        """
        if self._last is not None:
            self._last.wait(timeout_s)

    def close(self) -> None:
        """Finish the uploads and end; further calls of `publish` are refused.

        Raises:
            PublishError: the last version did not become visible.
        """
        self._closed = True
        self._uploader.close()
        self._keeper.close()
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except PublishError:
            if error is None:
                raise
            logger.exception("The last version was not published.")

    def save_shadow(self, directory: str | Path) -> None:
        """Write the bits published last to a directory, as safetensors, to resume from (`shadow`).

        What was saved there before is overwritten; if that is cut short, resuming finds out and reads the channel instead.

        Raises:
            ConfigError: nothing was published yet, or the directory cannot be written.
        """
        if not self._shadow:
            raise ConfigError("There is no shadow to save before the first publish.")
        folder = Path(directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, data in self._weight_files():
                (folder / name).write_bytes(data)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error.strerror}.") from error

    def _open(self, resume: bool, shadow: str | Path | None) -> tuple[Head | None, list[Link]]:
        """Look at the channel; continue it if asked to. Returns its head, None if there is no version yet, and the chain."""
        reader = ChannelReader(self.store)
        try:
            channel = reader.channel()
        except NotPublishedError:
            return None, []
        if not resume:
            raise ChannelInUseError(
                f"{self.store.url} already holds run {channel.run_id}. Pass resume=True to continue it, or use another URL."
            )
        if channel.dtype != self.settings.dtype:
            raise ChannelInUseError(f"Run {channel.run_id} is published in {channel.dtype}, not in {self.settings.dtype}.")
        self._channel, self._specs = channel, reader.specs
        head = self._roll_forward(reader)
        if head is None:
            return None, []
        self._channel_stored = True
        try:
            replica = Replica(self.store)
            if shadow is not None:
                _load_shadow(replica, shadow)
            replica.sync(head.version)
            newest = reader.manifest(head.version, head.manifest_sha256)
            chain_bytes = sum(step.payload_bytes for step in reader.plan(None, head) if not step.use_anchor)
            by_reference = reader.manifest(newest.anchor_version).reference is not None
        except (FormatError, MissingVersionError) as error:
            logger.warning("Version %d cannot be read: %s The next version has full weights.", head.version, error)
            self._tip = Tip(head.version)
            return head, []
        self._shadow = {name: bits_of(tensor) for name, tensor in replica.state_dict().items()}
        self._fingerprints = replica.fingerprints
        self._tip = Tip(head.version, newest.anchor_version, chain_bytes, by_reference)
        self._since = head.version, head.version, {}
        logger.info("resumed run=%s version=%d", channel.run_id, head.version)
        return head, newest.chain_onward(head.manifest_sha256)

    def _roll_forward(self, reader: ChannelReader) -> Head | None:
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
        data = self.store.read(layout.manifest(version))
        found = reader.manifest(version)
        sha256 = manifest.sha256_hex(data)
        head = Head(format=manifest.FORMAT, run_id=found.run_id, version=version, manifest_sha256=sha256)
        self.store.replace(layout.HEAD, manifest.encode(head))
        logger.warning("version %d was complete but not named by head; rolled forward", version)
        return head

    def _recover(self) -> None:
        """After a lost version, forget the tip, so that the next version is an anchor.

        Raises:
            HeadConflictError: another publisher writes to this channel.
        """
        lost = self._uploader.take_lost()
        if lost is None:
            return
        job, error = lost
        logger.warning("%s This publish starts from an anchor.", error)
        # A number whose manifest may be stored is never used for other content.
        self._tip = Tip(version=job.attempted_version)
        self._since = None
        if self._tip.version == 0:
            self._shadow, self._fingerprints = {}, {}

    def _advance_shadow(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Patch]:
        """Take the stream into the shadow; returns the steps, of the very first stream those from the initial checkpoint."""
        if not self._shadow:
            return self._fill_shadow(named_tensors)
        changes: dict[str, Patch] = {}
        fingerprints = dict(self._fingerprints)
        seen: dict[str, TensorSpec] = {}
        try:
            for name, served in self._served(named_tensors, seen):
                if seen[name] != self._specs.get(name):
                    continue  # reported below, after the stream has been drained
                old_N = self._shadow[name]
                index_K, step_K = cpu.diff(old_N, bits_of(served))
                if index_K.size:
                    changes[name] = Patch(name, index_K, step_K, absolute=False)
                    _, gained = cpu.scatter(fingerprint.tensor_key(name), old_N, index_K, step_K, False, index_K)
                    self._fingerprints[name] = (self._fingerprints[name] + gained) & fingerprint.MASK
            check_specs(self._specs, seen, "The published model")
        except BaseException:
            self._retreat_shadow(changes, fingerprints)
            raise
        return changes

    def _retreat_shadow(self, changes: Mapping[str, Patch], fingerprints: dict[str, int]) -> None:
        """Undo `_advance_shadow`."""
        if not fingerprints:
            self._shadow, self._fingerprints = {}, {}
            return
        for name, patch in changes.items():
            assert patch.index_K is not None
            self._shadow[name][patch.index_K] -= patch.data
        self._fingerprints = fingerprints

    def _fill_shadow(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Patch]:
        specs: dict[str, TensorSpec] = {}
        shadow = {name: bits_of(served).copy() for name, served in self._served(named_tensors, specs)}
        if not specs:
            raise ModelMismatchError("The stream held no tensors; nothing was published.")
        if self._specs:
            check_specs(self._specs, specs, "The published model")
        changes: dict[str, Patch] = {}
        if self._initial is not None:
            self._reference, changes = checkpoint.compare(self._initial, specs, shadow)
            if changes:
                logger.warning("%d tensors are not as in %s; they follow as a delta.", len(changes), self._reference)
        self._specs, self._shadow = specs, shadow
        self._fingerprints = {name: cpu.fingerprint(fingerprint.tensor_key(name), bits) for name, bits in shadow.items()}
        if self._channel is None:
            table = {name: (spec.dtype, spec.shape) for name, spec in specs.items()}
            self._channel = Channel(
                format=manifest.FORMAT,
                run_id=uuid.uuid4().hex,
                created_at=_now(),
                dtype=self.settings.dtype,
                tensors=table,
                tensors_sha256=manifest.table_sha256(table),
            )
        return changes

    def _served(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], specs: dict[str, TensorSpec]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream in the served dtype; fills `specs`."""
        for name, tensor in named_tensors:
            if name in specs:
                raise ModelMismatchError(f"The stream held {name} twice; nothing was published.")
            served = cast(tensor, self.settings.dtype)
            specs[name] = spec_of(name, served)
            yield name, served

    def _next_job(self, waiting: Job | None, changes: dict[str, Patch], step: int | None) -> Job:
        """The next version, or the one that still waits with these changes folded in."""
        assert self._channel is not None
        if self._initial is not None and self._tip.version == 0:
            waiting = self._opening_job(step if not changes else None)
            if not changes:
                return waiting
        opening = None
        if waiting is None:
            base, coalesced, uploaded = self._tip, 1, Future[None]()
        elif waiting.manifest.reference is not None:
            base, coalesced, uploaded, opening = _OPENED, 1, waiting.uploaded, waiting
        else:
            base, coalesced, uploaded = waiting.base, waiting.manifest.coalesced + 1, waiting.uploaded
            opening = waiting.opening
            changes = _fold_changes(waiting.patches, changes)
        total = sum(spec.element_count for spec in self._specs.values())
        weight_bytes = sum(bits.nbytes for bits in self._shadow.values())
        full = base.anchor_version == 0
        version = base.version + 1
        delta = None
        delta_files: list[tuple[str, bytes]] = []
        if not full:
            delta_files = self._encode(changes, version, base.version)
            changed = sum(patch.changed for patch in changes.values())
            # Digest and files are known once they are uploaded.
            delta = Delta(
                base_version=base.version,
                base_manifest_sha256="",
                codec=self.settings.codec,
                changed=changed,
                files=[],
            )
        chain_bytes = base.chain_bytes + sum(len(data) for _, data in delta_files)
        anchored = full or version - base.anchor_version >= self._anchor_every(base) or chain_bytes > weight_bytes
        self._tip = Tip(version, version)
        if not anchored:
            self._tip = Tip(version, base.anchor_version, chain_bytes, base.by_reference)
        return Job(
            base=base,
            patches=changes,
            channel=self._channel if full and not self._channel_stored else None,
            manifest=Manifest(
                format=manifest.FORMAT,
                run_id=self._channel.run_id,
                version=version,
                kind="anchor" if anchored else "delta",
                step=step,
                created_at=_now(),
                total=total,
                fingerprint=fingerprint.to_hex(sum(self._fingerprints.values())),
                anchor_version=self._tip.anchor_version,
                delta=delta,
                anchor=Anchor(directory="", files=[]) if anchored else None,
                coalesced=coalesced,
            ),
            delta_files=delta_files,
            anchor_files=self._anchor_files() if anchored else [],
            opening=opening,
            uploaded=uploaded,
        )

    def _opening_job(self, step: int | None) -> Job:
        """Version 1: the checkpoint that everybody has, by reference."""
        assert self._channel is not None and self._reference is not None
        self._tip = _OPENED
        return Job(
            base=Tip(),
            patches={},
            channel=self._channel,
            manifest=Manifest(
                format=manifest.FORMAT,
                run_id=self._channel.run_id,
                version=1,
                kind="anchor",
                step=step,
                created_at=_now(),
                total=sum(spec.element_count for spec in self._specs.values()),
                fingerprint=fingerprint.to_hex(sum(int(digest, 16) for digest in self._reference.fingerprints.values())),
                anchor_version=1,
                anchor=Anchor(directory="", files=[], reference=self._reference),
                requires=[manifest.REFERENCE],
            ),
            delta_files=[],
            anchor_files=[],
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

    def _next_fold(self, job: Job, changes: dict[str, Patch]) -> EncodedFold | None:
        """Add the changes to those that the next fold will cover; the fold, if it is complete with this version."""
        every, version = self._retention.fold_every, job.manifest.version
        if not every:
            return None
        if self._since is None or job.manifest.delta is None:
            self._since = version, version, {}
            return None
        base, upto, patches = self._since
        if version > upto and upto - base >= every:  # unless more changes join a version that still waits
            base, patches = upto, {}
        patches = _fold_changes(patches, changes)
        fold = None
        if version - base >= every:
            files = self._encode(patches, version, base)
            changed = sum(patch.changed for patch in patches.values())
            fold = EncodedFold(base, self.settings.codec, changed, files[0][1] if files else None)
        self._since = base, version, patches
        return fold

    def _published(self, job: Job) -> None:
        self._keeper.published(job.manifest.version, job.fold)

    def _encode(self, changes: dict[str, Patch], version: int, base_version: int) -> list[tuple[str, bytes]]:
        """The payload files of a delta; none if nothing changed."""
        if not changes:
            return []
        encoder = codec.get(self.settings.codec).encoder()
        for name, patch in changes.items():
            assert patch.index_K is not None
            digest = fingerprint.to_hex(self._fingerprints[name])
            encoder.add(self._specs[name], patch.index_K, patch.data, self._shadow[name], digest)
        return [(layout.delta_part(1, 1), encoder.finish(version, base_version))]

    def _anchor_files(self) -> list[tuple[str, bytes]]:
        """The checkpoint directory of the shadow: a copy of the weights, in memory until it is uploaded."""
        return [*self._model_files.items(), *self._weight_files()]

    def _weight_files(self) -> Iterator[tuple[str, bytes]]:
        tensors = {name: tensor_of(bits, self._specs[name]) for name, bits in self._shadow.items()}
        return anchor.weight_files(tensors, self._fingerprints, self.settings.shard_bytes)

    def _receipt(self, job: Job, encode_s: float) -> Receipt:
        document = job.manifest
        anchor_bytes = sum(len(data) for name, data in job.anchor_files if name.endswith(".safetensors"))
        first = document.delta is None
        return Receipt(
            version=document.version,
            kind=document.kind,
            step=document.step,
            changed=document.total if document.delta is None else document.delta.changed,
            total=document.total,
            payload_bytes=anchor_bytes if first else sum(len(data) for _, data in job.delta_files),
            anchor_bytes=anchor_bytes,
            encode_s=encode_s,
            _job=job,
        )


def _load_shadow(replica: Replica, directory: str | Path) -> None:
    """Start the replica from a saved shadow, if it is of the model and a version that is still known."""
    try:
        version = replica.load(directory)
    except (ConfigError, FormatError, MissingVersionError, ModelMismatchError) as error:
        logger.warning("The saved shadow is not used: %s", error)
    else:
        logger.info("saved shadow version=%s", version)


def _fold_changes(first: Mapping[str, Patch], second: Mapping[str, Patch]) -> dict[str, Patch]:
    """Fold two sets of steps, tensor by tensor."""
    folded = dict(first)
    for name, patch in second.items():
        merged = fold(folded[name], patch) if name in folded else patch
        if merged is None:
            del folded[name]
        else:
            folded[name] = merged
    return folded


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
