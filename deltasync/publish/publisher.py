"""Publish a stream of tensors as the next version of a channel: DETECT (`shadow`), ENCODE (`encode`), PUBLISH
(`upload`).

`publish` reads the stream and compares it with the shadow, in the caller's thread. Meanwhile an idle uploader
encodes and stores what changed, group by group. If the uploader falls behind, the changes wait and later ones
are merged into them: memory stays bounded, and the trainer never waits for the network.

The ranks of a sharded trainer publish together, each what it holds. They agree on each publish: all take it,
or none.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Unpack

import numpy as np
import torch
import torch.distributed as dist

from deltasync.channel.documents import TokenLag
from deltasync.channel.reading import ChannelReader
from deltasync.channel.signing import Trusted
from deltasync.config import PublisherOptions, PublisherSettings, Retention, token_ages, whole_number
from deltasync.ending import uninterrupted
from deltasync.errors import ConfigError, get_logger
from deltasync.opening.owner import OVERWRITE
from deltasync.opening.resumed import StepCheck
from deltasync.opening.start import (
    ChannelState,
    Start,
    check_arguments,
    open_first,
    prove_writes,
    warn_of_growth,
)
from deltasync.ops.compactor import maintains
from deltasync.publish.detect import Difference
from deltasync.publish.log import Log
from deltasync.publish.pending import Pending, Receipt
from deltasync.publish.shadow import Shadow, collect_weights
from deltasync.publish.upload import PartQueue, UploadQueue
from deltasync.stores import Store
from deltasync.tensors import Fingerprints
from deltasync.tensors.delta import joined, merge
from deltasync.threads import Home, OneCaller, let_go
from deltasync.trainer.ranks import Ranks, attempt
from deltasync.trainer.stream import Stream

logger = get_logger(__name__)

_Value = TypeVar("_Value")


_UNKNOWN_TIMEOUT_S = 60.0  # for ranks, where the settings that say it are wrong


class Publisher:
    """Writes one channel. One of its methods is called at a time, from any thread; other calls are refused
    meanwhile.

    A sharded trainer makes one on each rank, all with the same arguments, and calls each method on all ranks.
    Each rank compares, encodes and uploads what it holds; the version appears when all parts are stored. If
    one rank raises, all do. Only the first rank needs the keys.

    Args:
        channel: URL of the channel, or an opened store.
        model_files: The files beside the weights that make an anchor a checkpoint: a directory with
            config.json, tokenizer and so on, or the bytes by name. Without them anchors hold weights only.
        initial: The checkpoint that trainer and replicas start from: a directory, or a model on the Hub as
            `namespace/name@revision`. The first version of a new channel then is a reference to it and
            uploads no weights; if the first stream has other bits, these follow as a delta, the second
            version. Each rank of a `group` reads it.
        resume: Continue the run that the channel holds; without it a used channel is refused. If the first
            publish has a `step` that the channel has, the bits must be those that it has; "overwrite"
            continues with any.
        owner: The job that publishes, so that it continues the run that it has begun, without `resume`, and
            no other: an id that stays when the job starts again, such as Slurm's, or a `pathlib.Path` of a
            file that stays, which is made with a random id. No secret: channel.json names it.
        retention: How to look after the channel in the background; from the environment if None.
        group: The ranks of a sharded trainer; None if this process has the whole model.
        **options: See `PublisherSettings`.

    Raises:
        ChannelInUseError: the channel holds a run, `resume` was not given, and another owner has begun it.
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
        resume: bool | Literal["overwrite"] = False,
        owner: str | os.PathLike[str] | None = None,
        retention: Retention | None = None,
        group: dist.ProcessGroup | None = None,
        **options: Unpack[PublisherOptions],
    ) -> None:
        self._home, self._calls = Home("publisher"), OneCaller("publisher")
        given, problem = attempt(lambda: check_arguments(channel, model_files, retention, resume, options))
        if group is None and problem is not None:
            raise problem
        self._ranks = Ranks(group, _UNKNOWN_TIMEOUT_S if given is None else given[0].peer_timeout_s)
        try:
            self._ranks.agree(problem)  # so that all ranks know at once what fails at one
            assert given is not None
            settings, chosen, self.store, files = given
            if retention is None and self._ranks.rank == 0:
                warn_of_growth(self.store, chosen)
            self._begin_run(settings, chosen, files, initial, resume, owner)
        except BaseException:
            self._ranks.close("could not open its publisher")
            raise
        self._ranks.enter(False)

    def _begin_run(
        self,
        given: PublisherSettings,
        retention: Retention,
        files: Mapping[str, bytes],
        initial: str | Path | None,
        resume: bool | Literal["overwrite"],
        owner: str | os.PathLike[str] | None,
    ) -> None:
        def begin() -> tuple[ChannelState, str]:
            state, self._log = open_first(self.store, given, bool(resume), files, owner)
            return state, uuid.uuid4().hex

        state, token = self._ranks.first(begin, tuple[ChannelState, str])
        prove_writes(self._ranks, self.store, token)
        reader = ChannelReader(self.store, None if state.trusted is None else Trusted(state.trusted))
        self.settings = state.settings
        self._run_id, self._version = state.run_id, state.number
        self._shadow: Shadow | None = None
        # of the whole tensors, as the shadows of all ranks have them
        self._agreed: Fingerprints | None = None
        self._last: Receipt | None = None
        # Whether a publish was interrupted; whether the shadow may have any bits; whether the next version
        # has full weights.
        self._is_interrupted = self._is_torn = self._starts_over = False
        self._is_new = False  # whether the shadow has the bits of a first stream, and no version has them yet
        self._serial, self._closed = 0, False
        maintenance = maintains(
            *(reader, self._log, retention, files, state.chain),
            *(self.settings.anchor_every, self._ranks),
        )
        self._start = Start(self._ranks, reader, state, initial, maintenance)
        self._check_step = StepCheck(self._ranks, reader, self._log)
        # whether the next publish is the first of a resumed run
        self._resumes = bool(state.number) and resume != OVERWRITE
        self._uploader: UploadQueue | PartQueue
        if self._log is not None:
            self._uploader = UploadQueue(self._log, maintenance, self.settings, self._ranks, files)
        else:
            self._uploader = PartQueue(self.store, self.settings, self._ranks, maintenance)
        if state.channel is not None and self._ranks.size == 1:
            self._shadow = self._start.resumed(self._start.source.held[0])
            if self._start.is_resumed:
                self._uploader.resume()

    @property
    def run_id(self) -> str | None:
        """The run that the channel holds; None before the first publish to a new channel."""
        return None if self._start.channel is None else self._run_id

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
            named_tensors: A module (its `state_dict()`), a mapping, or pairs of name and tensor: every tensor
                of the model, each once, of any dtype, device and stride; floating ones are cast to the served
                dtype. All are read before this returns, and may change afterwards. With a `group` also the
                shards that this rank holds, as `DTensor` or `TensorRange`; of tensors that are whole on all
                ranks the first rank's are published. On a GPU a mapping or a list is fastest: all its tensors
                are compared at once, those of a generator one by one.
            step: The trainer's step, a whole number, stored as metadata. Ranks that publish together must
                name it: they compare it.
            token_lag: Mean, 95th percentile and maximum age, in versions, of tokens trained since the last
                call; metadata.
            if_changed: Publish nothing if no bit differs from the last publish.

        Returns:
            The receipt; `receipt.wait()` blocks until the version is visible. With `if_changed` it may be the
            last one.

        Raises:
            ModelMismatchError: names, shapes or dtypes are not the channel's. Nothing is published and the
                shadow is as before, as with any error that the stream or the encoder raises.
            ChannelInUseError: this is the first publish of a resumed run, and the channel has other bits of
                this step.
            FencedError: another publisher has opened the channel.
            PublishError: another rank failed, or does not answer; nothing was published.
            ConfigError: another method runs, in another thread, or in this one: the call comes from a signal
                handler or from the stream that is published. Nothing was done.
        """
        self._home.check()
        self._calls.begin("publish")
        try:
            return self._published(named_tensors, step, token_lag, if_changed)
        finally:
            self._calls.end()

    @uninterrupted
    def _published(
        self, named_tensors: Stream, step: int | None, token_lag: TokenLag | None, if_changed: bool
    ) -> Receipt:
        if self._closed:
            raise ConfigError("This publisher is closed.")

        def numbers() -> tuple[int | None, TokenLag | None]:
            if step is None and self._ranks.others:
                raise ConfigError(
                    "Ranks that publish together name the step, publish(..., step=N): one that left a call "
                    "out would go "
                    "unnoticed, and a version would mix the weights of two steps. Nothing was published."
                )
            return None if step is None else whole_number(
                "step", step
            ), None if token_lag is None else token_ages(token_lag)

        checked, problem = attempt(numbers)
        if self._is_interrupted:
            self._recover()
        try:
            self._is_interrupted = True  # until it ends, or until `_recover` has
            with self._ranks.inside():
                receipt = self._publish(named_tensors, *(checked or (None, None)), problem, if_changed)
        except BaseException:
            self._recover()
            raise
        self._is_interrupted = False
        return receipt

    def _publish(
        self,
        named_tensors: Stream,
        step: int | None,
        token_lag: TokenLag | None,
        problem: BaseException | None,
        if_changed: bool,
    ) -> Receipt:
        before_s, ranks, uploader, shadow = time.perf_counter(), self._ranks, self._uploader, self._shadow
        uploader.pause()
        found: Difference | None = None
        with torch.no_grad():
            if shadow is None or (ranks.size == 1 and self._start.initial is not None and uploader.is_first):
                ranks.agree(problem)
                found = self._begin(named_tensors)
            elif problem is None:
                uploader.warm_up()
                found, problem = attempt(lambda: self._start.source.compare(shadow, named_tensors))
        if self._resumes:
            self._check_step(step, self._shadow, found, problem)
            self._resumes = False
        # The first rank decides: it knows what became of the versions before.
        version, full, collects, joins = ranks.first(
            self._decide, tuple[int, bool, bool, bool], problem=problem, same=f"step {step}"
        )
        assert self._shadow is not None and found is not None
        if joins and isinstance(uploader, PartQueue):
            uploader.join()
        jobs = self._jobs(version, found, full=full, collects=collects)
        if if_changed and self._last is not None and not joins and not full and not jobs[-1].changed:
            jobs[-1].drop_weights()
            uploader.unpause()
            return self._last
        jobs[-1].step, jobs[-1].token_lag = step, token_lag
        for job in jobs:
            if job.full:
                job.end_encoding(0 if job.reference is not None else job.shadow.layout.nbytes)
        # Before the uploader has the job: one that it keeps for the next publish gets other futures, which
        # nobody waits for.
        receipt = Receipt.of(jobs[-1], time.perf_counter() - before_s)
        uploader.submit(*jobs)
        self._version, self._last = jobs[-1].version, receipt
        self._starts_over = self._is_torn = self._is_new = False
        self._shadow.warn_of_nan(self._version)
        return receipt

    def expect_resumed(self, compares: bool = True) -> None:
        """Compare the next publish with the channel as the first one of a resumed run: the trainer has loaded
        a checkpoint.

        Versions that are not stored yet are not compared. With False the next one is any publish. All ranks
        call this.
        """
        self._resumes = compares and self._version > 0

    def first(self, action: Callable[[], _Value]) -> _Value:
        """Run an action on the first rank of a sharded trainer and return its result at all ranks.

        Raises:
            BaseException: what the action raises; a `DeltaSyncError` with the same message at the others.
            ConfigError: another method runs (`publish`).
        """
        self._calls.begin("first")
        try:
            with self._ranks.inside():
                return self._ranks.first(action)
        finally:
            self._calls.end()

    def flush(self, timeout_s: float | None = None) -> None:
        """Block until everything published so far is visible.

        Raises:
            PublishError: as `Receipt.wait` of the last publish, which other threads may call meanwhile.
            ConfigError: another method runs (`publish`).
        """
        self._home.check()
        self._calls.begin("flush")
        try:
            self._flush(timeout_s)
        finally:
            self._calls.end()

    def _flush(self, timeout_s: float | None = None) -> None:
        if self._last is not None:
            with self._ranks.inside():
                try:
                    self._last.wait(timeout_s)
                finally:
                    if self._last.done and self._ranks.rank == 0:
                        self._ranks.wait_until_seen()

    def close(self) -> None:
        """Finish the uploads and end. Later calls of `publish` are refused.

        A publisher that is not closed when the process ends finishes its uploads, as long as the store takes
        them.

        Raises:
            PublishError: the last version did not become visible.
            ConfigError: another method runs (`publish`). The publisher stays open.
        """
        self._home.check()
        self._calls.begin("close")
        try:
            self._close()
        finally:
            self._calls.end()

    def _close(self) -> None:
        if self._closed:
            self._flush()
            return
        self._closed = True
        if self._is_interrupted:
            self._recover()
        try:
            with self._ranks.inside():
                self._uploader.close()
            self._flush()
        finally:
            self._ranks.close()

    def __repr__(self) -> str:
        return f"Publisher({self.store.url!r}, version={self._version})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise
            logger.exception("The last version was not published.")

    def _decide(self) -> tuple[int, bool, bool, bool]:
        """First rank: return the next version's number, whether it has full weights, whether the ranks
        collect full weights for it or for an anchor beside it, and whether it joins a waiting job.
        """
        uploader = self._uploader
        assert isinstance(uploader, UploadQueue)
        number, full = uploader.base(joins=not self._starts_over)
        full = full or self._starts_over
        collects = self._ranks.size > 1 and (full or uploader.maintenance.is_due(number))
        return number, full, collects, uploader.joined is not None

    def _begin(self, named_tensors: Stream) -> Difference:
        """Compare the first stream with the version before, or with the reference that this is."""
        start, may_refer = self._start, self._shadow is not None or self._version == 0
        self._shadow = None
        found = start.compare(named_tensors, may_refer=may_refer)
        if start.is_resumed:
            self._uploader.resume()
        self._shadow, self._agreed, self._is_new = start.shadow, None, not start.is_resumed
        return found

    def _jobs(self, version: int, found: Difference, *, full: bool, collects: bool) -> list[Pending]:
        """Agree with all ranks on the fingerprints, and apply the difference.

        Return the version's job, and before it that of the reference that it builds on.

        Raises:
            PublishError: a rank is lost.
            OSError: the disk is full, with the full weights of a sharded trainer.
        """
        shadow, waiting, channel = self._shadow, self._uploader.joined, self._start.channel
        reference, self._start.reference = self._start.reference, None
        assert shadow is not None and channel is not None
        if full and reference is None:  # by then they may be wrong, which is why the weights follow in full
            shadow.forget_fingerprints()
            self._agreed = None
        pieces = found.pieces
        if waiting is not None and not full and waiting.pieces and pieces:
            pieces = [merge([waiting.delta, joined(pieces, shadow.layout)])]
        elif waiting is not None and not full:
            pieces = [*waiting.pieces, *pieces]
        gains = found.gains
        if waiting is not None and not full:
            gains = {
                width: gain_T + waiting.gains.get(width, np.zeros_like(gain_T))
                for width, gain_T in gains.items()
            }
            gains = {**waiting.gains, **gains}
        fingerprints: Fingerprints | None = None
        changed = sum(delta.changed for delta in pieces)
        if self._ranks.size > 1:
            changed, fingerprints = self._agree(changed, found)
        elif not full or reference is not None:
            # else the uploader computes them, so that the trainer does not wait
            fingerprints = shadow.fingerprints.with_gains(found.gains)
        if found.pieces:
            self._uploader.wait_released()
            self._is_torn = True
            shadow.apply(found)  # before weights are collected, which are the new ones
        jobs: list[Pending] = []

        def job(**fields: Any) -> Pending:
            self._serial += 1
            return Pending(serial=self._serial, version=version, channel=channel, shadow=shadow, **fields)

        if reference is not None:
            known = {name: int(digest, 16) for name, digest in reference.fingerprints.items()}
            jobs = [
                job(full=True, reference=reference, fingerprints=Fingerprints.by_name(shadow.layout, known))
            ]
            if not changed:
                return jobs
            version, full, collects = 2, False, False
        weights = None
        if collects:
            assert fingerprints is not None
            weights = collect_weights(
                self._ranks, shadow, channel.specs, self._start.source.held, fingerprints
            )
        made = job(full=full, weights=weights, collected=collects, fingerprints=fingerprints)
        if not full:
            made.changed, made.pieces, made.gains = changed, pieces, gains
        if waiting is not None:  # the new job answers its receipts too
            waiting.drop_weights()
            made.encoded, made.uploaded, made.coalesced = (
                waiting.encoded,
                waiting.uploaded,
                waiting.coalesced + 1,
            )
        return [*jobs, made]

    def _agree(self, changed: int, found: Difference) -> tuple[int, Fingerprints]:
        """Return the sum over all ranks of a number, and the fingerprints of the whole tensors after a
        difference.

        The first time the ranks exchange their shares; later what these gain, which costs a bit for a tensor
        that gains nothing.
        """
        shadow, before = self._shadow, self._agreed
        assert shadow is not None
        layout = shadow.layout
        zeros = Fingerprints(
            layout, {w: np.zeros(len(vector.specs), np.uint64) for w, vector in layout.vectors.items()}
        )
        shares = shadow.fingerprints.with_gains(found.gains)
        added = shares if before is None else zeros.with_gains(found.gains)
        changed, new, *sums = self._ranks.agree(None, changed, before is None, *added.values())
        if new and new != self._ranks.size:  # a rank has lost count
            before, sums = None, self._ranks.agree(None, *shares.values())
        gains = Fingerprints.by_name(layout, dict(zip(layout.specs, sums, strict=True)))
        self._agreed = (zeros if before is None else before).with_gains(gains.of)
        return changed, self._agreed

    def _recover(self) -> None:
        """Clean up after a failed or interrupted publish.

        A waiting job goes on. If the shadow may have any bits, the next version has full weights.
        """
        self._uploader.let_go()
        if self._shadow is not None:
            let_go(self._shadow.lock)
        if self._is_torn or self._ranks.rank:
            self._uploader.drop()  # which would be encoded from other bits than its own
        if self._is_torn:
            self._starts_over, self._agreed = True, None
        if self._is_new or (self._is_torn and self._ranks.size == 1):
            self._shadow = None
        self._is_torn = self._is_new = False
        self._uploader.unpause()
        self._is_interrupted = False
