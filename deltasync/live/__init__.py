"""Live weights as segments of memory, and the commit: the only code that writes them."""

from __future__ import annotations

from deltasync.live.host import HostMemory
from deltasync.live.memory import LiveMemory
from deltasync.live.segments import Prints, Segment, Union, assemble, model_fingerprint
from deltasync.live.staging import Staged

__all__ = [
    "HostMemory",
    "LiveMemory",
    "Prints",
    "Segment",
    "Staged",
    "Union",
    "assemble",
    "memory",
    "model_fingerprint",
    "segments",
    "staging",
]
