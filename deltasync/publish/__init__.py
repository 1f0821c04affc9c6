"""Write a channel: detect what changed, encode it, and make it visible as the next version.

The names are imported on first use, so that what reads a stream or compares weights loads no more than that
needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltasync.publish.opened import Opened
    from deltasync.publish.pending import Receipt
    from deltasync.publish.publisher import BasePublisher

_HOME = {"BasePublisher": "publisher", "Opened": "opened", "Receipt": "pending"}

__all__ = [
    "BasePublisher",
    "Opened",
    "Receipt",
    "agreement",
    "anchor",
    "append",
    "detect",
    "encode",
    "log",
    "maintenance",
    "opened",
    "pending",
    "placement",
    "ranges",
    "shadow",
    "snapshot",
    "upload",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deltasync.publish' has no attribute {name!r}")
    return getattr(importlib.import_module(f"deltasync.publish.{_HOME[name]}"), name)
