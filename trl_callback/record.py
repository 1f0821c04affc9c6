"""What is remembered of a published version."""

from __future__ import annotations

import dataclasses
import time


@dataclasses.dataclass(frozen=True, kw_only=True)
class VersionRecord:
    """One published version. See [`~deltasync.Receipt`] for the numbers.

    Attributes:
        version (`int`): Version of the channel.
        step (`int`): The trainer's `global_step`.
        kind (`str`): `"anchor"` or `"delta"`.
        changed (`int`): Elements whose bits changed.
        total (`int`): Elements of all tensors.
        payload_bytes (`int`): Bytes of the changes, or of the weights in the first version.
        anchor_bytes (`int`): Bytes of the full weights stored with the version.
        encode_s (`float`): Seconds that training waited for reading, comparing and encoding.
        ack_s (`float`, *optional*): Seconds that training then waited for upload and acknowledgement; `None` if it did not.
        coalesced (`int`): How many times it was published: more than once if its upload had not begun by the next time.
        time_s (`float`): When, in seconds since the epoch.
    """

    version: int
    step: int
    kind: str
    changed: int
    total: int
    payload_bytes: int
    anchor_bytes: int
    encode_s: float
    ack_s: float | None
    coalesced: int = 1
    time_s: float = dataclasses.field(default_factory=time.time)

    @property
    def changed_fraction(self) -> float:
        """Changed elements of all elements."""
        return self.changed / self.total if self.total else 0.0

    @property
    def bits_per_changed(self) -> float | None:
        """Payload bits per changed element; `None` if nothing changed."""
        return 8 * self.payload_bytes / self.changed if self.changed else None

    def metrics(self) -> dict[str, float]:
        """Name the numbers for the trainer's logs; unknown ones are left out."""
        values = {
            "version": self.version,
            "changed_fraction": self.changed_fraction,
            "payload_bytes": self.payload_bytes,
            "bits_per_changed": self.bits_per_changed,
            "encode_s": self.encode_s,
            "ack_s": self.ack_s,
            "coalesced": self.coalesced,
        }
        return {f"delta_sync/{name}": value for name, value in values.items() if value is not None}
