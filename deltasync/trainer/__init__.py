"""Trainers: the publisher, streams of sharded and wrapped models, and the messages between ranks. A wing of
the core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltasync.trainer.publisher import Publisher

__all__ = ["Publisher", "agreement", "ranks", "source", "stream"]


def __getattr__(name: str) -> Any:
    if name != "Publisher":
        raise AttributeError(f"module 'deltasync.trainer' has no attribute {name!r}")
    return importlib.import_module("deltasync.trainer.publisher").Publisher
