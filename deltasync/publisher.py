"""From a stream of tensors to the next version of a channel: DETECT (`shadow`), ENCODE (`jobs`), PUBLISH (`upload`).

The shadow holds the bits last handed to the uploader. `publish` drains the stream, diffs it against the shadow and
encodes, all in the caller's thread; the uploader does the rest in the background. If it falls behind, the version that
still waits is folded together with the next one, so that memory stays bounded and the trainer never waits for the network.

Of a sharded trainer all ranks publish together, each what it holds; they agree on every step, so that all take it or none.
A trainer in one process does the same with `Peers` that are only itself.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from deltasync import anchor, fingerprint, layout, manifest, signing
from deltasync.config import PublisherSettings, Retention
from deltasync.errors import ApplyError, ChainError, ConfigError, FormatError, ModelMismatchError, PublishError
from deltasync.housekeeping.survey import now
from deltasync.initial import load_initial, refer
from deltasync.jobs import JobMaker
from deltasync.keeper import Keeper
from deltasync.manifest import Channel, Head
from deltasync.opening import Opened, open_channel, replica_at
from deltasync.part_upload import PartUploader
from deltasync.peers import Group, Peers, Range, attempt
from deltasync.reader import ChannelReader
from deltasync.receipt import Receipt
from deltasync.shadow import Shadow, Stream, check_coverage
from deltasync.signing import Signer, Trusted
from deltasync.stores import Store, open_store
from deltasync.types import Patch, TensorSpec, check_specs
from deltasync.upload import Job, Tip, Uploader
from deltasync.writer import Writer

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")


class Publisher:
    """Writes one channel. Call `publish` from one thread.

    A sharded trainer makes one on each rank, all with the same arguments, and calls each method on all ranks. Each rank
    compares, encodes and uploads what it holds; the version appears when all parts are stored. If one raises, all do.

    Arguments that are not listed here are those of `PublisherSettings`. Of a `group` the first rank has the keys.

    Args:
        channel: URL of the channel, or an opened store.
        model_files: What makes an anchor a checkpoint: a directory with config.json, tokenizer and so on, or those files'
            bytes by name. Without it anchors hold weights only.
        initial: The checkpoint that trainer and replicas start from: a directory, or a model on the Hub as
            `namespace/name@revision`. The first version of a new channel then is a reference to it, and uploads no weights;
            if the first stream has other bits, these are the second version, a delta. Each rank of a `group` reads it.
        resume: Continue the run that the channel holds; without it a used channel is refused.
        shadow: A directory that `save_shadow` wrote, to resume with fewer downloads; held to its fingerprint, not needed.
            Not with a `group`.
        retention: How to look after the channel in the background; from the environment if None.
        group: The ranks of a sharded trainer; None if this process has the whole model.

    Raises:
        ChannelInUseError: the channel holds a run and `resume` was not given.
        ConfigError: a setting is wrong.

    Examples:
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
        shadow_placement: str | None = None,
        shard_bytes: int | None = None,
        retries: int | None = None,
        retry_delay_s: float | None = None,
        peer_timeout_s: float | None = None,
        signing_key: str | Path | None = None,
        trusted_keys: str | Path | None = None,
        model_files: str | Path | Mapping[str, bytes] | None = None,
        initial: str | Path | None = None,
        resume: bool = False,
        shadow: str | Path | None = None,
        retention: Retention | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        settings = PublisherSettings.from_env(
            codec=codec,
            anchor_every=anchor_every,
            dtype=dtype,
            shadow_placement=shadow_placement,
            shard_bytes=shard_bytes,
            retries=retries,
            retry_delay_s=retry_delay_s,
            peer_timeout_s=peer_timeout_s,
            signing_key=signing_key,
            trusted_keys=trusted_keys,
        )
        self._retention = Retention.from_env() if retention is None else retention
        if group is not None:
            _check_sharded(settings, self._retention, shadow)
        self.store = open_store(channel) if isinstance(channel, str) else channel
        if isinstance(model_files, str | Path):
            model_files = anchor.companion_files(Path(model_files))
        files = dict(model_files) if model_files is not None else {}
        for name in files:
            layout.check_key(name)
        self._peers = Peers() if group is None else Group(group, settings.peer_timeout_s)
        self._last: Receipt | None = None
        self._closed = False
        self._signer: Signer | None = None
        self._trusted: Trusted | None = None
        opened, settings = self._open(settings, resume)
        self._jobs = JobMaker(settings, self._retention, self._peers, files)
        self._fingerprints = self._jobs.fingerprints
        self._initial = None if initial is None or opened.head is not None else load_initial(self._peers, initial)
        self._jobs.channel, self._tip = opened.channel, opened.tip
        self._jobs.channel_stored = opened.channel is not None
        self._keeper = Keeper(self._reader(), self._retention, self._signer)
        self._uploader: Uploader | PartUploader
        writer = Writer(self.store, settings, self._signer)
        if self._peers.rank == 0:
            self._uploader = Uploader(writer, opened.head, opened.chain, self._published, self._peers.signals)
        else:
            self._uploader = PartUploader(writer, self._peers.signals)
        # The version to go on from; of a sharded trainer only the first stream tells which parts of it are to be read.
        self._resumes = opened if opened.tip.anchor_version else None
        self._saved = shadow
        if self._jobs.channel is not None and group is None:
            self._jobs.specs = self._jobs.channel.specs
            self._jobs.held = [{name: (0, spec.element_count) for name, spec in self._jobs.specs.items()}]
            self._jobs.shadow = self._read_resumed(self._jobs.held[0])

    @property
    def settings(self) -> PublisherSettings:
        """How it writes; of all ranks those of the first."""
        return self._jobs.settings

    @settings.setter
    def settings(self, settings: PublisherSettings) -> None:
        self._jobs.settings = settings

    @property
    def run_id(self) -> str | None:
        """The run that this channel holds; None before the first publish to a new one."""
        return None if self._jobs.channel is None else self._jobs.channel.run_id

    @property
    def version(self) -> int:
        """The newest version handed to the uploader, 0 before the first."""
        return self._tip.version

    @property
    def shadow_bytes(self) -> dict[str, int]:
        """Memory that the shadow takes in this process: on the `host`, and on a `device`."""
        shadow = self._jobs.shadow
        if shadow is None:
            return {"host": 0, "device": 0}
        return {"host": sum(bits.nbytes for bits in shadow.bits.values()), "device": shadow.device_bytes}

    def publish(self, named_tensors: Stream, step: int | None = None) -> Receipt:
        """Publish the weights as the next version; the upload goes on in the background.

        Args:
            named_tensors: Every tensor of the model, each once, of any dtype, device and stride; floating ones are cast to
                the served dtype. Read completely and not kept: the tensors may change as soon as this returns. With a
                `group` also the shards that this rank holds, as `DTensor` or `TensorRange`; of tensors that are whole on all
                ranks those of the first are published. On a GPU a list, or a dict's `items()`, is compared fastest: its
                tensors stay, so that all of them are compared at once; those of a generator are compared one by one.
            step: The trainer's step, stored as metadata.

        Returns:
            The receipt; `receipt.wait()` blocks until the version is visible.

        Raises:
            ModelMismatchError: names, shapes or dtypes are not the channel's. Nothing is published and the shadow is as
                before, as with any error that the stream or the encoder raises.
            HeadConflictError: another publisher writes to this channel.
            PublishError: another rank failed, or does not answer; nothing was published.
        """
        if self._closed:
            raise ConfigError("This publisher is closed.")
        before = time.perf_counter()
        _, problem = attempt(self._recover)
        if problem is not None and self._peers.size == 1:
            raise problem
        with torch.no_grad():
            shadow, changes, fingerprints, failure = self._take(named_tensors)
        waiting: Job | None = None
        try:
            waiting = self._agree_on_base(problem or failure)
            job = self._jobs.job(self._tip, waiting, changes, step)
            job.fold = self._jobs.fold(job, changes)
        except BaseException:
            if waiting is not None:
                self._uploader.submit(waiting)
            shadow.retreat(changes, fingerprints)
            raise
        if waiting is not None:
            waiting.drop_files()
        receipt = Receipt.of(job, time.perf_counter() - before)
        self._tip, self._last = job.tip, receipt
        self._uploader.submit(job)
        if nan := shadow.with_nan:
            logger.warning(
                "Version %d is published as it is, but has NaN in %d tensors: %s. Whoever serves it will answer nonsense.",
                *(receipt.version, len(nan), ", ".join(nan[:5])),
            )
        if self._peers.rank == 0:
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

    def first(self, action: Callable[[], _Value]) -> _Value:
        """What the first rank gets by an action, at all ranks of a sharded trainer: whether to publish now, say.

        Raises:
            BaseException: what the action raises, at the first rank.
            DeltaSyncError: the same, at the others.
            PublishError: a rank does not answer.
        """
        return self._peers.first(action)

    def flush(self, timeout_s: float | None = None) -> None:
        """Block until everything published so far is visible.

        Raises:
            TimeoutError, PublishError: as `Receipt.wait` of the last publish.
        """
        if self._last is not None:
            try:
                self._last.wait(timeout_s)
            finally:
                if self._last.done and self._peers.rank == 0:
                    self._peers.signals.wait_until_seen()

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
            ConfigError: nothing was published yet, this rank has no whole weights, or the directory cannot be written.
        """
        if self._peers.size > 1:
            raise ConfigError("No rank of a sharded trainer has a whole shadow to save.")
        if self._jobs.shadow is None:
            raise ConfigError("There is no shadow to save before the first publish.")
        folder = Path(directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, data in self._jobs.weight_files():
                (folder / name).write_bytes(data)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error.strerror}.") from error

    def _open(self, settings: PublisherSettings, resume: bool) -> tuple[Opened, PublisherSettings]:
        """What the first rank finds in the channel, and its settings."""
        opened, settings, names = self._peers.first(lambda: self._look(settings, resume))
        self._trusted = None if names is None else Trusted(names)
        return opened, settings

    def _look(self, settings: PublisherSettings, resume: bool) -> tuple[Opened, PublisherSettings, list[str] | None]:
        self._signer = signing.signer_of(settings)
        self._trusted = None if self._signer is None else self._signer.trusted
        opened = open_channel(self._reader(), settings.dtype, resume, self._signer)
        return opened, settings, None if self._trusted is None else self._trusted.names

    def _reader(self) -> ChannelReader:
        return ChannelReader(self.store, self._trusted)

    def _take(self, named_tensors: Stream) -> tuple[Shadow, dict[str, Patch], dict[str, int], BaseException | None]:
        """Take the stream into the shadow.

        Returns:
            The shadow; the steps; its fingerprints before, to undo them; what this rank failed with.
        """
        if self._jobs.shadow is None:
            shadow, changes, fingerprints = self._begin(named_tensors)
            return shadow, changes, fingerprints, None
        shadow, fingerprints = self._jobs.shadow, dict(self._jobs.shadow.fingerprints)
        settings = self.settings
        taken, failure = attempt(
            lambda: shadow.advance(named_tensors, settings.dtype, self._peers.rank, settings.shadow_placement)
        )
        return shadow, taken or {}, fingerprints, failure

    def _begin(self, named_tensors: Stream) -> tuple[Shadow, dict[str, Patch], dict[str, int]]:
        """Learn from the first stream who holds what. The steps are those from the version that is resumed, or from the
        initial checkpoint; otherwise there are none.

        Raises:
            ModelMismatchError, ConfigError: at all ranks. Nothing was taken.
        """
        first, problem = attempt(lambda: Shadow.of(named_tensors, self.settings.dtype, self._peers.rank))
        if first is not None and self._jobs.channel is not None:
            known = self._jobs.channel.specs
            _, problem = attempt(lambda: check_specs(known, first.specs, "The published model"))
        self._peers.agree(problem)
        assert first is not None
        told = self._peers.share((self._jobs.channel or _new_channel(first.specs, self.settings.dtype), first.ranges))
        channel, held = told[0][0], [ranges for _, ranges in told]
        differs = [rank for rank, (other, _) in enumerate(told) if other.tensors_sha256 != channel.tensors_sha256]
        if differs:
            raise ModelMismatchError(f"Rank {differs[0]} publishes other names, dtypes or shapes than rank 0.")
        check_coverage(channel.specs, held)
        resumed = self._read_resumed(first.ranges)
        changes: dict[str, Patch] = {}
        fingerprints = dict((resumed or first).fingerprints)
        if resumed is not None:
            changes = resumed.advance(first.stream(), "keep", self._peers.rank)
        elif self._initial is not None:
            self._jobs.reference, fingerprints, changes = refer(self._peers, self._initial, first)
            if changes:
                logger.warning("%d tensors are not as in %s; they follow as a delta.", len(changes), self._jobs.reference)
        self._jobs.channel, self._jobs.specs, self._jobs.held = channel, channel.specs, held
        self._jobs.shadow = resumed or first
        return self._jobs.shadow, changes, fingerprints

    def _read_resumed(self, ranges: Mapping[str, Range]) -> Shadow | None:
        """These ranges of the version that is resumed; None if there is none, or if it cannot be read."""
        if self._resumes is None:
            return None
        opened = self._resumes
        head = opened.head
        assert head is not None
        shadow, problem = attempt(lambda: self._read(head, ranges))
        damage = problem if isinstance(problem, FormatError | ChainError | ApplyError) else None
        added = 0 if shadow is None else sum(shadow.fingerprints.values())
        damaged, total = self._peers.agree(None if damage else problem, damage is not None, added)
        self._resumes = None
        version = head.version
        if damaged or fingerprint.to_hex(total) != opened.chain[-1].fingerprint:
            why = damage or "on another rank, or it has other bits than it promises"
            logger.warning("Version %d cannot be read: %s The next version has full weights.", version, why)
            self._tip = Tip(version)
            return None
        self._jobs.since = version, version, {}
        logger.info("resumed run=%s version=%d", head.run_id, version)
        return shadow

    def _read(self, head: Head, ranges: Mapping[str, Range]) -> Shadow:
        if self._peers.size == 1:
            return Shadow.whole(replica_at(self._reader(), head.version, self._saved).state_dict())
        reader = self._reader()
        return Shadow.read(reader, reader.plan(None, head), ranges)

    def _agree_on_base(self, problem: BaseException | None) -> Job | None:
        """Agree that no rank has a problem, on the fingerprints of whole tensors, and on what the next version builds on.

        The first rank alone knows what became of the versions before; it tells the others.

        Returns:
            The job that still waits and is to be replaced, None if there is none.

        Raises:
            HeadConflictError: another publisher writes to this channel.
            BaseException: `problem`.
            DeltaSyncError: that of another rank.
        """
        assert self._jobs.shadow is not None
        waiting: Job | None = None
        told = [0, 0, 0, 0]
        if self._peers.rank == 0 and problem is None:
            waiting = self._uploader.take_waiting()
            told = [self._tip.version, self._tip.anchor_version, self._tip.chain_bytes, waiting is not None]
        try:
            version, anchor_version, chain_bytes, replaces, *fingerprints = self._peers.agree(
                problem, *told, *(self._jobs.shadow.fingerprints[name] for name in self._jobs.specs)
            )
        except BaseException:
            if waiting is not None:
                self._uploader.submit(waiting)
            raise
        if self._peers.size > 1 and self._last is not None and version == 0:
            self._jobs.reference = None  # it was lost, and the other ranks hear of it too late to compare again
        self._tip = dataclasses.replace(self._tip, version=version, anchor_version=anchor_version, chain_bytes=chain_bytes)
        self._fingerprints.update(zip(self._jobs.specs, fingerprints, strict=True))
        return self._uploader.take_waiting() if self._peers.rank and replaces else waiting

    def _recover(self) -> None:
        """After a lost version, forget the tip, so that the next version is an anchor. Only the first rank knows of it.

        Raises:
            HeadConflictError: another publisher writes to this channel.
        """
        lost = self._uploader.take_lost() if isinstance(self._uploader, Uploader) else None
        if lost is None:
            return
        job, error = lost
        logger.warning("%s This publish starts from an anchor.", error)
        # A number whose manifest may be stored is never used for other content.
        self._tip = Tip(version=job.attempted_version)
        self._jobs.since = None
        if self._initial is not None and self._tip.version == 0 and self._peers.size == 1:
            self._jobs.shadow = None  # to be compared with the initial checkpoint again

    def _published(self, job: Job) -> None:
        self._keeper.published(job.manifest.version, job.fold)


def _check_sharded(settings: PublisherSettings, retention: Retention, shadow: str | Path | None) -> None:
    if shadow is not None:
        raise ConfigError("A sharded trainer cannot resume from a saved shadow; without it each rank reads the channel.")
    if settings.codec == "context":
        raise ConfigError("codec='context' needs whole tensors, which no rank of a sharded trainer has; use 'packed'.")
    if retention.fold_every:
        raise ConfigError("A sharded trainer writes no folds; leave fold_every at 0 and run `deltasync fold`.")


def _new_channel(specs: Mapping[str, TensorSpec], dtype: str) -> Channel:
    table = {name: (spec.dtype, spec.shape) for name, spec in specs.items()}
    return Channel(
        format=manifest.FORMAT,
        run_id=uuid.uuid4().hex,
        created_at=now(),
        dtype=dtype,
        tensors=table,
        tensors_sha256=manifest.table_sha256(table),
    )
