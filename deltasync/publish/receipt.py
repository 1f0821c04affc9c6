"""What a publisher hands back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import Self

from deltasync.publish.encode import Job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receipt:
    """What `publish` did, and a handle on what goes on in the background.

    Attributes:
        version: The version that carries these weights. A later publish joins it if its upload has not begun by then.
        kind: `anchor` if the version's record has full weights, else `delta`.
        step: The trainer's step, as given.
        changed: Elements whose bits differ from the version before; all of them in full weights.
        total: Elements of all tensors.
        held_s: Seconds that `publish` took.

    All numbers are of all ranks together, seconds aside.
    """

    version: int
    kind: str
    step: int | None
    changed: int
    total: int
    held_s: float
    _encoded: Future[tuple[int, float]] = dataclasses.field(repr=False)
    _uploaded: Future[str] = dataclasses.field(repr=False)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the version's delta, or of its weights before compression; 0 for a reference. Waits until it is encoded.

        Raises:
            PublishError: it was lost before.
        """
        return self._encoded.result()[0]

    @property
    def anchor_bytes(self) -> int:
        """Bytes of the weights if the version's record has them, 0 for a delta."""
        return self.payload_bytes if self.kind == "anchor" else 0

    @property
    def encode_s(self) -> float:
        """Seconds from the first tensor of the stream to the finished payload, less those that it waited for the store.

        Raises:
            PublishError: as `payload_bytes`.
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
        """Whether `payload_bytes` and `encode_s` are known, so that asking for them does not wait."""
        return self._encoded.done()

    @property
    def digest(self) -> str:
        """Digest of the version's record; waits until it is visible.

        Raises:
            PublishError: as `wait`.
        """
        return self._uploaded.result()

    @property
    def done(self) -> bool:
        """Whether the upload has ended, well or not."""
        return self._uploaded.done()

    def when_done(self, action: Callable[[], None]) -> None:
        """Call `action` once the upload has ended, well or not; in the thread that ends it."""
        self._uploaded.add_done_callback(lambda _: action())

    def wait(self, timeout_s: float | None = None) -> Self:
        """Block until the version is visible.

        Raises:
            TimeoutError: still uploading; the upload goes on.
            PublishPendingError: the store has not said whether it has the version; the next publish asks again.
            PublishError: the version did not become visible, and why.
        """
        try:
            self._uploaded.result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"Version {self.version} is still being uploaded after {timeout_s} s.") from None
        return self

    @classmethod
    def of(cls, job: Job, held_s: float) -> Self:
        """What is told of a job."""
        total = sum(spec.element_count for spec in job.shadow.specs.values())
        return cls(
            version=job.version,
            kind=job.kind,
            step=job.step,
            changed=total if job.full else job.changed,
            total=total,
            held_s=held_s,
            _encoded=job.encoded,
            _uploaded=job.uploaded,
        )
