"""Publish a stream of tensors as the next version of a channel: DETECT (`shadow`), ENCODE (`encode`), PUBLISH
(`upload`, `append`).

`publish` reads the stream and compares it with the shadow, in the caller's thread. Meanwhile an idle uploader
encodes and stores what changed, group by group. If the uploader falls behind, the changes wait and later ones
are merged into them: memory stays bounded, and the trainer never waits for the network.

Several processes may publish together, each what it holds. They agree on each publish (`agreement`): all take
it, or none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Self

import torch

from deltasync.channel.documents import TokenLag
from deltasync.config import token_ages, whole_number
from deltasync.ending import uninterrupted
from deltasync.errors import ConfigError, get_logger
from deltasync.publish.agreement import attempt
from deltasync.publish.detect import Difference
from deltasync.publish.opened import Opened
from deltasync.publish.pending import Pending, Receipt
from deltasync.publish.ranges import Stream
from deltasync.publish.upload import Decision
from deltasync.threads import OneCaller, release_after_interrupt

logger = get_logger(__name__)


class BasePublisher:
    """Publishes to a channel that was opened. One of its methods is called at a time, from any thread; other
    calls are refused meanwhile.

    Attributes:
        store: The channel's store.
        settings: As they are in the channel.
        agreement: The agreement with other processes that publish with it.
    """

    def __init__(self, opened: Opened) -> None:
        self._calls = OneCaller("publisher")
        self._opened, self._start, self._uploader = opened, opened.start, opened.queue
        self.store, self.settings, self.agreement = opened.store, opened.settings, opened.agreement
        self._version, self._resumes = opened.version, opened.resumes
        self._shadow = self._start.shadow
        self._last: Receipt | None = None
        # Whether a publish was interrupted; whether the shadow may have any bits; whether the next version
        # has full weights.
        self._is_interrupted = self._is_torn = self._starts_over = False
        self._is_new = False  # whether the shadow has the bits of a first stream, and no version has them yet
        self._closed = False
        self._uploader.full = not self._start.is_resumed

    @property
    def run_id(self) -> str | None:
        """The run that the channel holds; None before the first publish to a new channel."""
        return None if self._start.channel is None else self._opened.run_id

    @property
    def version(self) -> int:
        """The newest version handed to the uploader; 0 before the first."""
        return self._version

    @property
    def digest(self) -> str | None:
        """Digest of the newest visible version; None before the first, and at all ranks but the first."""
        log = self._opened.log
        return None if log is None or log.tip is None else log.tip.sha256

    @property
    def published(self) -> Mapping[int, str]:
        """Digests of the versions that this publisher stored, by number; empty at all ranks but the first."""
        return {} if self._opened.log is None else self._opened.log.published

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
        with self._calls("publish"):
            return self._published(named_tensors, step, token_lag, if_changed)

    @uninterrupted
    def _published(
        self, named_tensors: Stream, step: int | None, token_lag: TokenLag | None, if_changed: bool
    ) -> Receipt:
        if self._closed:
            raise ConfigError("This publisher is closed.")

        def numbers() -> tuple[int | None, TokenLag | None]:
            self.agreement.check_step(step)
            return (
                None if step is None else whole_number("step", step),
                None if token_lag is None else token_ages(token_lag),
            )

        checked, problem = attempt(numbers)
        if self._is_interrupted:
            self._recover()
        try:
            self._is_interrupted = True  # until it ends, or until `_recover` has
            with self.agreement.inside():
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
        before_s, uploader, shadow = time.perf_counter(), self._uploader, self._shadow
        uploader.pause()
        found: Difference | None = None
        with torch.no_grad():
            if shadow is None or self._begins_again:
                self.agreement.agree(problem)
                found = self._begin(named_tensors)
            elif problem is None:
                uploader.finisher.warm_up(uploader)
                found, problem = attempt(lambda: self._start.source.compare(shadow, named_tensors))
        if self._resumes:
            self._opened.check_step(step, self._shadow, found, problem)
            self._resumes = False
        decision = uploader.finisher.decide(uploader, self._starts_over, problem, f"step {step}")
        assert self._shadow is not None and found is not None
        jobs = self._jobs(decision, found)
        is_same = not decision.joins and not decision.full and not jobs[-1].changed
        if if_changed and self._last is not None and is_same:
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

    def flush(self, timeout_s: float | None = None) -> None:
        """Block until everything published so far is visible.

        Raises:
            PublishError: as `Receipt.wait` of the last publish, which other threads may call meanwhile.
            ConfigError: another method runs (`publish`).
        """
        with self._calls("flush"):
            self._flush(timeout_s)

    def _flush(self, timeout_s: float | None = None) -> None:
        if self._last is not None:
            with self.agreement.inside():
                try:
                    self._last.wait(timeout_s)
                finally:
                    if self._last.done:
                        self.agreement.wait_until_seen()

    def close(self) -> None:
        """Finish the uploads and end. Later calls of `publish` are refused.

        A publisher that is not closed when the process ends finishes its uploads, as long as the store takes
        them.

        Raises:
            PublishError: the last version did not become visible.
            ConfigError: another method runs (`publish`). The publisher stays open.
        """
        with self._calls("close"):
            self._close()

    def _close(self) -> None:
        if self._closed:
            self._flush()
            return
        self._closed = True
        if self._is_interrupted:
            self._recover()
        try:
            with self.agreement.inside():
                self._uploader.close()
            self._flush()
        finally:
            self.agreement.close()

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

    @property
    def _begins_again(self) -> bool:
        """Whether the next version is the channel's first one, after an attempt that was lost, and may refer
        to a checkpoint.
        """
        log = self._opened.log
        is_first = log is not None and log.next_version == 1
        return self._start.begins_again and is_first and self._uploader.is_lost

    def _begin(self, named_tensors: Stream) -> Difference:
        """Compare the first stream with the version before, or with the reference that this is."""
        start, may_refer = self._start, self._shadow is not None or self._version == 0
        self._shadow = None
        found = start.compare(named_tensors, may_refer=may_refer)
        if start.is_resumed:
            self._uploader.full = False
        self._shadow, self._is_new = start.shadow, not start.is_resumed
        self.agreement.forget()
        return found

    def _jobs(self, decision: Decision, found: Difference) -> list[Pending]:
        """Agree on the fingerprints, and apply the difference.

        Return the version's job, and before it that of the reference that it builds on.

        Raises:
            PublishError: another process is lost.
            OSError: the disk is full, with full weights that were collected.
        """
        serial, version, full, collects, _ = decision
        shadow, waiting, channel = self._shadow, self._uploader.joined, self._start.channel
        reference, self._start.reference = self._start.reference, None
        assert shadow is not None and channel is not None
        if full and reference is None:  # by then they may be wrong, which is why the weights follow in full
            shadow.forget_fingerprints()
            self.agreement.forget()
        pieces, gains = found.pieces, found.gains
        if waiting is not None and not full:
            pieces, gains = waiting.merged(found)
        changed, fingerprints = self.agreement.totals(
            shadow, found, sum(delta.changed for delta in pieces), needed=not full or reference is not None
        )
        if found.pieces:
            self._uploader.wait_released()
            self._is_torn = True
            shadow.apply(found)  # before weights are collected, which are the new ones
        jobs: list[Pending] = []
        if reference is not None:
            jobs = [Pending.of_reference(serial, version, channel, shadow, reference)]
            if not changed:
                return jobs
            serial, version, full, collects = serial + 1, 2, False, False
        weights = None
        if collects:
            assert fingerprints is not None
            weights = self.agreement.weights(shadow, channel.specs, self._start.source.held, fingerprints)
        made = Pending(
            serial=serial,
            version=version,
            channel=channel,
            shadow=shadow,
            full=full,
            weights=weights,
            collected=collects,
            fingerprints=fingerprints,
        )
        if not full:
            made.changed, made.pieces, made.gains = changed, pieces, gains
        if waiting is not None:
            made.take_over(waiting)
        return [*jobs, made]

    def _recover(self) -> None:
        """Clean up after a failed or interrupted publish.

        A waiting job goes on. If the shadow may have any bits, the next version has full weights.
        """
        if self._shadow is not None:
            release_after_interrupt(self._shadow.lock)
        self._uploader.recover(is_torn=self._is_torn)
        if self._is_torn:
            self._starts_over = True
            self.agreement.forget()
        if self._is_new:
            self._shadow = None
        self._is_torn = self._is_new = False
        self._uploader.unpause()
        self._is_interrupted = False
