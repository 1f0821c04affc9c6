"""Show a run from its channel alone: `Observer` looks at it, the page and `deltasync watch` show what it saw.

It reads documents, heartbeats and the headers of delta payloads, and writes nothing.
"""

from __future__ import annotations

from deltasync.dashboard.observe import Observer
from deltasync.dashboard.serve import PageServer, page
from deltasync.dashboard.snapshot import Snapshot

__all__ = ["Observer", "PageServer", "Snapshot", "costs", "forecast", "heat", "page"]
