"""Write a channel: detect what changed, encode it, and make it visible as the next version."""

from __future__ import annotations

from deltasync.publish.publisher import Publisher
from deltasync.publish.receipt import Receipt

__all__ = ["Publisher", "Receipt"]
