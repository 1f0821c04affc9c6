"""Channels and the layouts of other programs: version directories (`weight_v`) become a channel, or are
written from one.
"""

from __future__ import annotations

from deltasync.interchange.bridge import Export, Import

__all__ = ["Export", "Import"]
