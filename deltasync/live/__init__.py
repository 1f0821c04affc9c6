"""Live weights as segments of memory, and the commit: the only code that writes them."""

from __future__ import annotations

from deltasync.live import derived, plan, proof
from deltasync.live.devices import Device, accelerator
from deltasync.live.draft import DRAFT, WithDraft
from deltasync.live.memory import LiveMemory
from deltasync.live.segments import Prints, Segment, Union, assemble, model_fingerprint
from deltasync.live.staging import Staged

__all__ = [
    "DRAFT",
    "Device",
    "LiveMemory",
    "Prints",
    "Segment",
    "Staged",
    "Union",
    "WithDraft",
    "accelerator",
    "assemble",
    "derived",
    "model_fingerprint",
    "plan",
    "proof",
]
