"""Live weights as segments of memory, and the commit: the only code that writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltasync.live import derived, plan, proof
from deltasync.live.memory import LiveMemory
from deltasync.live.segments import Prints, Segment, Union, assemble, model_fingerprint
from deltasync.live.staging import Staged

if TYPE_CHECKING:  # it needs numba, which weights on a GPU do without
    from deltasync.live import compiling as compiling

__all__ = [
    "LiveMemory",
    "Prints",
    "Segment",
    "Staged",
    "Union",
    "assemble",
    "compiling",
    "derived",
    "model_fingerprint",
    "plan",
    "proof",
]
