"""A version on its way to the store, and the receipt for it."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

import msgspec
import numpy as np

from deltasync.channel import documents
from deltasync.channel.documents import Anchor, Channel, Record, Reference, TokenLag
from deltasync.errors import AckTimeoutError
from deltasync.publish.detect import Difference
from deltasync.publish.shadow import Shadow
from deltasync.publish.snapshot import Weights
from deltasync.tensors import Delta, Fingerprints, fingerprint
from deltasync.tensors.delta import joined, merge


@dataclasses.dataclass(kw_only=True, eq=False)
class Pending:
    """A version to encode and upload.

    Attributes:
        serial: Number of the job, the same on all ranks.
        channel: The channel's description, which may not be stored yet.
        shadow: Holds the bits to publish until the job is `released`.
        full: Whether it has full weights, so that its changes do not matter.
        coalesced: Number of publishes that it covers.
        changed: Elements that differ from the version before, over all ranks.
        pieces: Steps from the version before, in pieces of different elements. Later ones are merged into
            them while the job waits.
        gains: By width, the sums that the steps of this rank add to the fingerprints; uint64[T] each.
        fingerprints: Those of the whole tensors at this version; None if the uploader has to compute them.
        reference: The checkpoint that it refers to instead of holding weights.
        weights: Full weights, for the version's record or for an anchor beside it; at the first rank only.
        collected: Whether the first rank has such weights, or stores them.
        ended_s: When the job was made, after its stream had been read, by `time.perf_counter`.
        released: Set once it does not need the shadow any more.
        encoded: Bytes of its payloads, and the seconds since `ended_s`.
        uploaded: Digest of its record once that is visible, or the error.
    """

    serial: int
    version: int
    channel: Channel
    shadow: Shadow
    full: bool = False
    step: int | None = None
    token_lag: TokenLag | None = None
    coalesced: int = 1
    changed: int = 0
    pieces: Sequence[Delta] = ()
    gains: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    fingerprints: Fingerprints | None = None
    reference: Reference | None = None
    weights: Weights | None = None
    collected: bool = False
    ended_s: float = dataclasses.field(default_factory=lambda: time.perf_counter())
    released: threading.Event = dataclasses.field(default_factory=lambda: threading.Event())
    encoded: Future[tuple[int, float]] = dataclasses.field(default_factory=Future)
    uploaded: Future[str] = dataclasses.field(default_factory=Future)

    @property
    def kind(self) -> str:
        """The kind of its record."""
        return "anchor" if self.full else "delta"

    @functools.cached_property
    def delta(self) -> Delta:
        """All steps: where they are, if they are one piece, else on the host."""
        return joined(self.pieces, self.shadow.layout)

    def record(
        self,
        run_id: str,
        epoch: str,
        *,
        delta: documents.DeltaFiles | None = None,
        anchor: Anchor | None = None,
        requires: Sequence[str] = (),
    ) -> Record:
        """Return the record of the version, with its delta or its full weights."""
        assert self.fingerprints is not None
        return Record(
            run_id=run_id,
            kind=self.kind,
            version=self.version,
            epoch=epoch,
            created_at=documents.now(),
            fingerprint=fingerprint.to_hex(self.fingerprints.total),
            delta=delta,
            anchor=anchor,
            step=self.step,
            coalesced=self.coalesced,
            token_lag=msgspec.UNSET if self.token_lag is None else self.token_lag,
            requires=[*requires],
        )

    @classmethod
    def of_reference(
        cls, serial: int, version: int, channel: Channel, shadow: Shadow, reference: Reference
    ) -> Self:
        """Return a version that is a reference to a checkpoint."""
        known = {name: int(digest, 16) for name, digest in reference.fingerprints.items()}
        return cls(
            serial=serial,
            version=version,
            channel=channel,
            shadow=shadow,
            full=True,
            reference=reference,
            fingerprints=Fingerprints.by_name(shadow.layout, known),
        )

    def merged(self, found: Difference) -> tuple[Sequence[Delta], Mapping[int, np.ndarray]]:
        """Return the pieces and the gains of this job, which waits, and of a later difference."""
        pieces: Sequence[Delta] = [*self.pieces, *found.pieces]
        if self.pieces and found.pieces:
            pieces = [merge([self.delta, joined(found.pieces, self.shadow.layout)])]
        gains = {
            width: gain_T + self.gains.get(width, np.zeros_like(gain_T))
            for width, gain_T in found.gains.items()
        }
        return pieces, {**self.gains, **gains}

    def take_over(self, waiting: Self) -> None:
        """Answer the receipts of a waiting job too, which this one contains."""
        waiting.drop_weights()
        self.encoded, self.uploaded = waiting.encoded, waiting.uploaded
        self.coalesced = waiting.coalesced + 1

    def drop_weights(self) -> None:
        """Free the local disk of its weights."""
        if self.weights is not None:
            self.weights.close()
            self.weights = None

    def end_encoding(self, payload_bytes: int) -> None:
        """Tell the receipts the size of the payloads, unless they know it."""
        if not self.encoded.done():
            self.encoded.set_result((payload_bytes, time.perf_counter() - self.ended_s))

    def succeed(self, digest: str, payload_bytes: int) -> None:
        """Tell the receipts that the version is visible."""
        self.drop_weights()
        self.end_encoding(payload_bytes)
        self.uploaded.set_result(digest)

    def fail(self, error: BaseException) -> None:
        """Tell the receipts what went wrong."""
        self.drop_weights()
        self.released.set()
        _tell((self.encoded, self.uploaded), error)

    def detach_receipts(self) -> Callable[[BaseException], None]:
        """Give the job new futures for a retry. Returns a function that fails the old ones."""
        receipts, self.encoded, self.uploaded = (self.encoded, self.uploaded), Future(), Future()
        if self.full:  # whose size is known
            self.encoded.set_result(receipts[0].result())
        return functools.partial(_tell, receipts)


def _tell(futures: Iterable[Future[Any]], error: BaseException) -> None:
    """Raise an error from futures that have no result; of full weights the size is known before they are
    stored.

    Receipts keep it, perhaps for long, so it loses its tracebacks, whose frames hold payloads.
    """
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    for future in futures:
        if not future.done():
            future.set_exception(error)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receipt:
    """What `publish` did, and how its upload goes on. Counts and bytes are of all ranks together.

    Attributes:
        version: The version that carries these weights. Publishes that come before the upload of the one
            before has ended are one version together, with the newest of their weights: four without a wait
            are two or three versions, and their receipts then name the same one.
        kind: `anchor` if the version's record has full weights, else `delta`.
        step: The trainer's step, as given.
        changed: Elements whose bits differ from the version before; all of them in full weights.
        total: Elements of all tensors.
        held_s: Seconds that `publish` took.
        coalesced: Publishes that the version covers up to this one: more than 1 if earlier ones waited still,
            of which only the changes went into it.
    """

    version: int
    kind: str
    step: int | None
    changed: int
    total: int
    held_s: float
    coalesced: int
    _encoded: Future[tuple[int, float]] = dataclasses.field(init=False, repr=False)
    _uploaded: Future[str] = dataclasses.field(init=False, repr=False)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the version's delta, or of its weights before compression; 0 for a reference.

        Waits until the version is encoded; raises `PublishError` if it is lost before.
        """
        return self._encoded.result()[0]

    @property
    def anchor_bytes(self) -> int:
        """Bytes of the weights if the version's record has them, 0 for a delta."""
        return self.payload_bytes if self.kind == "anchor" else 0

    @property
    def encode_s(self) -> float:
        """Seconds from the first tensor to the finished payload, without waits for the store; waits as
        `payload_bytes`.
        """
        return self.held_s + self._encoded.result()[1]

    @property
    def bits_per_changed(self) -> float | None:
        """Payload bits per changed element; None if nothing changed."""
        return 8 * self.payload_bytes / self.changed if self.changed else None

    @property
    def changed_fraction(self) -> float:
        """Changed elements of all elements."""
        return self.changed / self.total if self.total else 0.0

    @property
    def is_encoded(self) -> bool:
        """Whether `payload_bytes` and `encode_s` are known."""
        return self._encoded.done()

    @property
    def digest(self) -> str:
        """Digest of the version's record. Waits until the version is visible; raises as `wait`."""
        return self._uploaded.result()

    @property
    def done(self) -> bool:
        """Whether the upload has ended, well or not."""
        return self._uploaded.done()

    @property
    def problem(self) -> BaseException | None:
        """Why the upload has ended without a visible version; None if it has one. Waits for the end."""
        return self._uploaded.exception()

    def when_done(self, action: Callable[[], None]) -> None:
        """Call `action` once the upload has ended, well or not; in the thread that ends it."""
        self._uploaded.add_done_callback(lambda _: action())

    def wait(self, timeout_s: float | None = None) -> Self:
        """Block until the version is visible.

        Raises:
            AckTimeoutError: still uploading; the upload goes on.
            PublishPendingError: the store has not said whether it has the version; the next publish asks
                again.
            PublishError: the version did not become visible, and why.
        """
        try:
            self._uploaded.result(timeout_s)
        except TimeoutError:
            raise AckTimeoutError(
                f"Version {self.version} is still being uploaded after {timeout_s} s."
            ) from None
        return self

    @classmethod
    def of(cls, job: Pending, held_s: float) -> Self:
        """Return the receipt of a job."""
        total = job.shadow.layout.element_count
        receipt = cls(
            version=job.version,
            kind=job.kind,
            step=job.step,
            changed=total if job.full else job.changed,
            total=total,
            held_s=held_s,
            coalesced=job.coalesced,
        )
        vars(receipt).update(_encoded=job.encoded, _uploaded=job.uploaded)
        return receipt
