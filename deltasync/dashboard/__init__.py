"""What there is to see of a run from its channel alone: `Observer` looks, the page and `deltasync watch` show.

Nothing is read but documents, heartbeats and the headers of delta payloads; nothing is written.
"""

from __future__ import annotations

from deltasync.dashboard.observe import Observer
from deltasync.dashboard.serve import PageServer, page
from deltasync.dashboard.snapshot import Snapshot

__all__ = ["Observer", "PageServer", "Snapshot", "heat", "page"]
