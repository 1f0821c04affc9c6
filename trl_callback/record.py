"""The history of published versions, and their numbers for the trainer's logs."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from typing import Any

from deltasync import Receipt
from deltasync.errors import PublishError

logger = logging.getLogger(__name__)

_OF_RECEIPT = ("version", "kind", "changed", "total", "payload_bytes", "anchor_bytes", "held_s", "encode_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VersionRecord:
    """One published version. Attributes not listed here are those of its [`~deltasync.Receipt`].

    Attributes:
        step (`int`): The trainer's `global_step`.
        ack_s (`float`, *optional*): Seconds that training then waited for the replicas; `None` if it did not
            wait.
        coalesced (`int`): Number of publications in it: more than one if its upload had not begun before the
            next.
        time_s (`float`): Time of publication, in seconds since the epoch.
    """

    version: int
    step: int
    kind: str
    changed: int
    total: int
    payload_bytes: int
    anchor_bytes: int
    held_s: float
    encode_s: float
    ack_s: float | None
    coalesced: int = 1
    # looked up at each call: a clock may be replaced
    time_s: float = dataclasses.field(default_factory=lambda: time.time())

    @property
    def changed_fraction(self) -> float:
        """Changed elements divided by all elements."""
        return self.changed / self.total if self.total else 0.0

    @property
    def bits_per_changed(self) -> float | None:
        """Payload bits per changed element; `None` if nothing changed."""
        return 8 * self.payload_bytes / self.changed if self.changed else None


class History:
    """One record for each version, made once the version is encoded. Training does not wait for that."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Receipt, dict[str, Any]]] = deque()
        self._records: list[VersionRecord] = []
        self._new_metrics: dict[str, float] = {}
        self._newest = 0
        self._coalesced = 0

    def add(self, receipt: Receipt, step: int, ack_s: float | None) -> None:
        """Add a version that was just published."""
        # If the upload of the previous version had not begun, it has become part of this one.
        self._coalesced = self._coalesced + 1 if receipt.version == self._newest else 1
        self._newest = receipt.version
        known = {"step": step, "ack_s": ack_s, "coalesced": self._coalesced, "time_s": time.time()}
        self._waiting.append((receipt, known))
        self.log(version=receipt.version, changed_fraction=receipt.changed_fraction, held_s=receipt.held_s)
        self.log(ack_s=ack_s, coalesced=self._coalesced)

    def encoded(self) -> list[VersionRecord]:
        """Return the records of the encoded versions, oldest first."""
        while self._waiting and self._waiting[0][0].is_encoded:
            receipt, known = self._waiting.popleft()
            try:
                record = VersionRecord(**{name: getattr(receipt, name) for name in _OF_RECEIPT}, **known)
            except PublishError:
                continue  # the version was lost; its upload reports the error
            if self._records and self._records[-1].version == record.version:
                self._records.pop()
            self._records.append(record)
            bits = record.bits_per_changed
            self.log(payload_bytes=record.payload_bytes, bits_per_changed=bits, encode_s=record.encode_s)
            logger.info(
                "version=%d changed_fraction=%.4f payload_bytes=%d bits_per_changed=%.2f encode_s=%.3f "
                "ack_s=%.3f",
                record.version,
                record.changed_fraction,
                record.payload_bytes,
                math.nan if bits is None else bits,
                record.encode_s,
                math.nan if record.ack_s is None else record.ack_s,
            )
        return self._records

    def metrics(self) -> dict[str, float]:
        """Return the new numbers since the last call, without unknown ones."""
        self.encoded()
        metrics, self._new_metrics = self._new_metrics, {}
        return metrics

    def log(self, **values: float | None) -> None:
        """Add numbers to the next `metrics`."""
        self._new_metrics |= {
            f"delta_sync/{name}": value for name, value in values.items() if value is not None
        }
