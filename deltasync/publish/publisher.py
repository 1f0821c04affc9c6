"""Publish a stream of tensors as the next version of a channel: DETECT (`shadow`), ENCODE (`encode`), PUBLISH (`upload`).

`publish` reads the stream and compares it with the shadow, in the caller's thread. Meanwhile an idle uploader encodes and
stores what changed, group by group. If the uploader falls behind, the changes wait and later ones are merged into them:
memory stays bounded, and the trainer never waits for the network.

The ranks of a sharded trainer publish together, each what it holds. They agree on each publish: all take it, or none.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, Unpack

import torch
import torch.distributed as dist

from deltasync.channel.documents import Reference, TokenLag
from deltasync.channel.reading import ChannelReader
from deltasync.channel.signing import Trusted
from deltasync.config import PublisherOptions, Retention, token_ages, whole_number
from deltasync.errors import ConfigError, get_logger
from deltasync.publish.collect import collect_weights
from deltasync.publish.compact import Compactor
from deltasync.publish.detect import Difference
from deltasync.publish.job import Job, Losses, Receipt, host_delta
from deltasync.publish.log import Log
from deltasync.publish.ownership import Ownership
from deltasync.publish.parts import PartUploader
from deltasync.publish.resume import FirstStream, Given, Start, open_first, prove_writes
from deltasync.publish.shadow import Shadow
from deltasync.publish.stream import Stream
from deltasync.publish.upload import Uploader
from deltasync.ranks.digests import Digests
from deltasync.ranks.peers import Peers, Range, attempt
from deltasync.stores import Store
from deltasync.tensors import Fingerprints, TensorSpec
from deltasync.tensors.delta import merge
from deltasync.threads import Home, let_go

logger = get_logger(__name__)

_Value = TypeVar("_Value")


class _Base(NamedTuple):
    """The next version and its base; the same at all ranks."""

    version: int  # its number
    full: bool  # whether it has full weights
    collects: bool  # whether the ranks collect full weights for it, or for an anchor beside it
    waiting: Job | None  # the job that it joins


_UNKNOWN_TIMEOUT_S = 60.0  # for ranks, where the settings that say it are wrong


class Publisher:
    """Writes one channel. Call `publish` from one thread.

    A sharded trainer makes one on each rank, all with the same arguments, and calls each method on all ranks. Each rank
    compares, encodes and uploads what it holds; the version appears when all parts are stored. If one rank raises, all do.
    Only the first rank needs the keys.

    Args:
        channel: URL of the channel, or an opened store.
        model_files: The files beside the weights that make an anchor a checkpoint: a directory with config.json, tokenizer
            and so on, or the bytes by name. Without them anchors hold weights only.
        initial: The checkpoint that trainer and replicas start from: a directory, or a model on the Hub as
            `namespace/name@revision`. The first version of a new channel then is a reference to it and uploads no weights;
            if the first stream has other bits, these follow as a delta, the second version. Each rank of a `group` reads it.
        resume: Continue the run that the channel holds; without it a used channel is refused.
        retention: How to look after the channel in the background; from the environment if None.
        group: The ranks of a sharded trainer; None if this process has the whole model.
        **options: See `PublisherSettings`.

    Raises:
        ChannelInUseError: the channel holds a run and `resume` was not given.
        ConfigError: a setting is wrong.

    Examples:
        >>> with Publisher("file:///data/run") as publisher:
        ...     receipt = publisher.publish(model.state_dict().items(), step=1)
        ...     receipt.wait(timeout_s=60).version
        1
    """

    _log: Log | None = None  # at the first rank only

    def __init__(
        self,
        channel: str | os.PathLike[str] | Store,
        *,
        model_files: str | Path | Mapping[str, bytes] | None = None,
        initial: str | Path | None = None,
        resume: bool = False,
        retention: Retention | None = None,
        group: dist.ProcessGroup | None = None,
        **options: Unpack[PublisherOptions],
    ) -> None:
        self._home = Home("publisher")
        given, problem = attempt(lambda: Given.of(channel, model_files, retention, options))
        if group is None and problem is not None:
            raise problem
        self._peers = Peers(group, _UNKNOWN_TIMEOUT_S if given is None else given.settings.peer_timeout_s)
        try:
            self._peers.agree(problem)  # so that all ranks know at once what fails at one
            assert given is not None
            self.store = given.store
            self._begin_run(given, initial, resume, alone=group is None)
        except BaseException:
            self._peers.close("could not open its publisher")
            raise
        self._peers.leave()

    def _begin_run(self, given: Given, initial: str | Path | None, resume: bool, *, alone: bool) -> None:
        def begin() -> tuple[Start, str]:
            start, self._log = open_first(self.store, given.settings, resume, given.files)
            return start, uuid.uuid4().hex

        start, token = self._peers.first(begin, tuple[Start, str])
        prove_writes(self._peers, self.store, given.settings, token)
        reader = ChannelReader(self.store, None if start.trusted is None else Trusted(start.trusted))
        self.settings = start.settings
        self._run_id, self._version, self._channel = start.run_id, start.number, start.channel
        self._specs: Mapping[str, TensorSpec] = {} if start.channel is None else start.channel.specs
        self._shadow: Shadow | None = None
        self._held: Sequence[Mapping[str, Range]] = []
        self._digests = Digests(self._peers, [])
        self._last: Receipt | None = None
        self._interrupted = False  # whether a publish was
        # Whether the shadow may have any bits, and whether the next version starts from new ones.
        self._is_unsure = self._starts_over = False
        self._is_taken = False  # whether the shadow has begun to take the difference of this publish
        self._serial, self._closed = 0, False
        self._losses = Losses()
        self._owned = Ownership(self._peers)
        self._first = FirstStream(self._peers, self._owned, reader, start, initial)
        self._uploader: Uploader | PartUploader
        if self._log is not None:
            given.warn_of_growth()
            compactor = Compactor(
                *(reader, self._log, given.retention, given.files, start.chain),
                *(start.settings.anchor_every, self._peers.signals if self._peers.size > 1 else None),
            )
            self._uploader = Uploader(self._log, compactor, start.settings, self._peers.signals)
        else:
            self._uploader = PartUploader(
                self.store, start.settings, self._peers.signals, compacts=given.retention.compact_every != 0
            )
        if start.channel is not None and alone:
            resumed = self._first.resumed({name: (0, spec.element_count) for name, spec in self._specs.items()})
            if resumed is not None:
                self._shadow, steps = resumed
                self._uploader.resume(steps)

    @property
    def run_id(self) -> str | None:
        """The run that the channel holds; None before the first publish to a new channel."""
        return None if self._channel is None else self._run_id

    @property
    def version(self) -> int:
        """The newest version handed to the uploader; 0 before the first."""
        return self._version

    @property
    def digest(self) -> str | None:
        """Digest of the newest visible version; None before the first, and at all ranks but the first."""
        return None if self._log is None or self._log.tip is None else self._log.tip.sha256

    @property
    def published(self) -> Mapping[int, str]:
        """Digests of the versions that this publisher stored, by number; empty at all ranks but the first."""
        return {} if self._log is None else self._log.published

    @property
    def shadow_bytes(self) -> dict[str, int]:
        """Memory that the shadow takes in this process, on the `host` and on the `device`."""
        return {"host": 0, "device": 0} if self._shadow is None else self._shadow.size_bytes

    def publish(
        self,
        named_tensors: Stream,
        step: int | None = None,
        token_lag: TokenLag | None = None,
        *,
        if_changed: bool = False,
    ) -> Receipt:
        """Publish the weights as the next version; the upload goes on in the background.

        Args:
            named_tensors: A module (its `state_dict()`), a mapping, or pairs of name and tensor: every tensor of the model,
                each once, of any dtype, device and stride; floating ones are cast to the served dtype. All are read before
                this returns, and may change afterwards. With a `group` also the shards that this rank holds, as `DTensor` or
                `TensorRange`; of tensors that are whole on all ranks the first rank's are published. On a GPU a mapping or a
                list is fastest: all its tensors are compared at once, those of a generator one by one.
            step: The trainer's step, a whole number, stored as metadata.
            token_lag: Mean, 95th percentile and maximum age, in versions, of tokens trained since the last call; metadata.
            if_changed: Publish nothing if no bit differs from the last publish.

        Returns:
            The receipt; `receipt.wait()` blocks until the version is visible. With `if_changed` it may be the last one.

        Raises:
            ModelMismatchError: names, shapes or dtypes are not the channel's. Nothing is published and the shadow is as
                before, as with any error that the stream or the encoder raises.
            FencedError: another publisher has opened the channel.
            PublishError: another rank failed, or does not answer; nothing was published.
        """
        self._home.check()
        if self._closed:
            raise ConfigError("This publisher is closed.")

        def numbers() -> tuple[int | None, TokenLag | None]:
            return None if step is None else whole_number("step", step), None if token_lag is None else token_ages(token_lag)

        checked, problem = attempt(numbers)
        if self._interrupted:
            self._start_over()
        self._interrupted = True  # an interrupt, which may come anywhere from here on, leaves it so
        try:
            with self._peers.inside():
                receipt = self._publish(named_tensors, checked or (None, None), problem, if_changed)
        except Exception:
            self._interrupted = self._is_unsure
            raise
        self._interrupted = False
        return receipt

    def _publish(
        self,
        named_tensors: Stream,
        numbers: tuple[int | None, TokenLag | None],
        problem: BaseException | None,
        if_changed: bool,
    ) -> Receipt:
        before_s, self._is_taken = time.perf_counter(), False
        step, token_lag = numbers
        base = self._agree_on_base(problem, f"step {step}")
        found: Difference | None
        reference: Reference | None = None
        problem = None
        try:
            with torch.no_grad():
                if self._shadow is None:
                    self._is_unsure = True  # until the version is submitted, whose bits the new shadow may have
                    base, found, reference = self._begin(base, named_tensors)
                else:
                    found, problem = attempt(lambda: self._compare(named_tensors))
            jobs = self._jobs(base, found or Difference(), reference, problem)
        except BaseException as error:
            if self._is_taken:  # what waits would be encoded from other bits than its own
                self._is_unsure = True
                self._uploader.drop_taken(base.waiting)
            else:
                self._is_unsure = self._is_unsure and not isinstance(error, Exception)
                self._give_up(base, reference)
            raise
        assert self._shadow is not None and found is not None
        if if_changed and self._last is not None and base.waiting is None and not base.full and not jobs[-1].changed:
            jobs[-1].drop_weights()
            self._give_up(base, reference)
            return self._last
        jobs[-1].step, jobs[-1].token_lag = step, token_lag
        for job in jobs:
            if job.full:
                job.end_encoding(0 if job.reference is not None else job.shadow.layout.nbytes)
            self._uploader.submit(job)
        self._version = jobs[-1].version
        self._starts_over = self._is_unsure = False
        self._last = Receipt.of(jobs[-1], time.perf_counter() - before_s)
        self._shadow.warn_of_nan(self._version)
        if self._peers.size > 1:
            self._losses.add(self._last)
        return self._last

    def first(self, action: Callable[[], _Value]) -> _Value:
        """Run an action on the first rank of a sharded trainer and return its result at all ranks.

        Raises:
            BaseException: what the action raises; a `DeltaSyncError` with the same message at the others.
        """
        with self._peers.inside():
            return self._peers.first(action)

    def flush(self, timeout_s: float | None = None) -> None:
        """Block until everything published so far is visible.

        Raises:
            PublishError: as `Receipt.wait` of the last publish.
        """
        self._home.check()
        if self._last is not None:
            with self._peers.inside():
                try:
                    self._last.wait(timeout_s)
                finally:
                    if self._last.done and self._peers.rank == 0:
                        self._peers.signals.wait_until_seen()

    def close(self) -> None:
        """Finish the uploads and end. Later calls of `publish` are refused.

        A publisher that is not closed when the process ends finishes its uploads, as long as the store takes them.

        Raises:
            PublishError: the last version did not become visible.
        """
        self._home.check()
        if not self._closed:
            self._closed = True
            if self._interrupted:
                self._start_over()
            try:
                with self._peers.inside():
                    self._uploader.close()
                self.flush()
            finally:
                self._peers.close()
        else:
            self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise
            logger.exception("The last version was not published.")

    def _agree_on_base(self, problem: BaseException | None, same: str) -> _Base:
        """Return what the next version builds on. The first rank decides: it knows what became of the versions before.

        `problem` has failed at this rank already, and then at all; so does what is not the `same` at all ranks.
        """
        uploader = self._uploader
        waiting: Job | None = None

        def decide() -> tuple[int, bool, bool, bool]:
            nonlocal waiting
            assert isinstance(uploader, Uploader)
            self._losses.check()
            waiting = None if self._starts_over else uploader.take()
            number, full = uploader.next() if waiting is None else (waiting.version, waiting.full)
            full = full or self._starts_over
            uploader.warm_up()
            collects = self._peers.size > 1 and (full or uploader.compactor.is_due(number))
            return number, full, collects, waiting is not None

        try:
            number, full, collects, joins = self._peers.first(
                decide, tuple[int, bool, bool, bool], problem=problem, same=same
            )
            if joins and isinstance(uploader, PartUploader):
                waiting = uploader.take()
        except BaseException:
            if waiting is not None:
                uploader.release(waiting)
            raise
        if full and number == 1 and self._first.initial is not None and self._peers.size == 1:
            self._shadow = None  # to be compared with the initial checkpoint, again if the reference was lost
        return _Base(number, full, collects, waiting)

    def _begin(self, base: _Base, named_tensors: Stream) -> tuple[_Base, Difference, Reference | None]:
        """Take the first stream. Return what its version builds on, the steps from there, and the reference if it is one."""
        begun = self._first.compare(named_tensors, self._channel, self.settings.dtype, may_refer=base.version == 1)
        if begun.steps is not None:
            self._uploader.resume(begun.steps)
            base = base._replace(full=False, collects=False)
        self._channel, self._specs, self._held, self._shadow = begun.channel, begun.channel.specs, begun.held, begun.shadow
        self._digests = Digests(self._peers, begun.held)
        return base, begun.difference, begun.reference

    def _compare(self, named_tensors: Stream) -> Difference:
        """Compare the stream with the shadow, once that may change."""
        assert self._shadow is not None
        found = self._shadow.compare(self._owned.later(named_tensors), self.settings.dtype, self._peers.rank)
        self._uploader.wait_released()
        return found

    def _job(self, base: _Base, **fields: Any) -> Job:
        assert self._channel is not None and self._shadow is not None
        self._serial += 1
        return Job(
            serial=self._serial, version=base.version, channel=self._channel, shadow=self._shadow, full=base.full, **fields
        )

    def _jobs(self, base: _Base, found: Difference, reference: Reference | None, problem: BaseException | None) -> list[Job]:
        """Agree with all ranks on the version. Return its job, and before it that of the reference that it builds on.

        Raises:
            BaseException: `problem`, or a `DeltaSyncError` with the message of another rank's.
            OSError: the disk is full, with the full weights of a sharded trainer.
        """
        shadow, waiting = self._shadow, base.waiting
        assert shadow is not None
        pieces = found.pieces
        if waiting is not None and not base.full and waiting.changed_here and pieces:
            pieces = [merge([waiting.delta, host_delta(shadow.layout, pieces)])]
        elif waiting is not None and not base.full:
            pieces = [*waiting.pieces, *pieces]
        fingerprints: Fingerprints | None = None
        changed, model = sum(delta.changed for delta in pieces), None
        if self._peers.size > 1:
            shares = {} if problem is not None else dict(shadow.fingerprints.with_gains(found.gains))
            everything = base.full or base.collects or reference is not None
            changed, agreed, model = self._digests.agree(problem, changed, shares, everything=everything)
            fingerprints = Fingerprints.by_name(shadow.layout, agreed)
        elif problem is not None:
            raise problem
        elif not base.full or reference is not None:  # else the uploader computes them, so that the trainer does not wait
            fingerprints = shadow.fingerprints.with_gains(found.gains)
        if found.pieces and reference is None:
            self._is_unsure = self._is_taken = True
            shadow.apply(found)  # before weights are collected, which are the new ones
            self._starts_over = True  # unless the version is submitted
        jobs: list[Job] = []
        if reference is not None:
            known = {name: int(digest, 16) for name, digest in reference.fingerprints.items()}
            jobs = [self._job(base, reference=reference, fingerprints=Fingerprints.by_name(shadow.layout, known))]
            if not changed:
                return jobs
            base = base._replace(version=2, full=False, collects=False)
        weights = None
        if base.collects:
            assert fingerprints is not None
            weights = collect_weights(self._peers, shadow, self._specs, self._held, fingerprints, self.settings)
        job = self._job(base)
        if waiting is not None:  # the new job answers its receipts too
            waiting.drop_weights()
            job.encoded, job.uploaded, job.coalesced = waiting.encoded, waiting.uploaded, waiting.coalesced + 1
        job.weights, job.fingerprints, job.model = weights, fingerprints, model
        job.collected = base.collects
        job.changed = 0 if base.full else changed
        job.pieces = () if base.full else pieces
        return [*jobs, job]

    def _give_up(self, base: _Base, reference: Reference | None) -> None:
        """Publish nothing: the shadow is as it was, and the waiting job goes on."""
        self._uploader.let_go()
        if reference is not None:
            self._shadow = None
        if base.waiting is not None:
            self._uploader.release(base.waiting)

    def _start_over(self) -> None:
        """End what an interrupted publish has left.

        If the shadow may have any bits, the next version has full weights.
        """
        self._uploader.let_go()
        if self._shadow is not None:
            let_go(self._shadow.lock)
        if isinstance(self._uploader, Uploader) and self._peers.size == 1:
            if self._is_unsure:
                self._uploader.drop_taken()
                self._is_unsure, self._starts_over, self._shadow = False, self._channel is not None, None
            self._uploader.release()
