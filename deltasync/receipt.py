"""What a publisher hands back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Self

from deltasync.upload import Job


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

    All numbers are of all ranks together, `encode_s` aside.
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

    @classmethod
    def of(cls, job: Job, encode_s: float) -> Self:
        """What is told of a job."""
        document = job.manifest
        return cls(
            version=document.version,
            kind=document.kind,
            step=document.step,
            changed=document.total if document.delta is None else document.delta.changed,
            total=document.total,
            payload_bytes=job.payload_bytes,
            anchor_bytes=job.anchor_bytes,
            encode_s=encode_s,
            _job=job,
        )
