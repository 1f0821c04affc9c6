"""Show a run; only its channel is needed. `ChannelObserver` reads it, the page and `deltasync watch` show its
snapshots.

An observer reads documents, heartbeats and the headers of delta payloads, and writes nothing but a probe
(`StoreClock`).
"""

from __future__ import annotations

from deltasync.ops.dashboard.observe import ChannelObserver, ChannelSnapshot
from deltasync.ops.dashboard.serve import PageServer, page

__all__ = ["ChannelObserver", "ChannelSnapshot", "PageServer", "page"]
