"""Look after a channel: `forget` and `prune`, `check` and `repair`, `copy`, `Relay`, `export`, `write_compaction`.

Each takes a `ChannelReader` and reports progress through a callback. What holds weights is imported on first use, so that
what only reads documents needs neither torch nor numba.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deltasync.maintenance.checks import Report, check
from deltasync.maintenance.gc import Pruned, forget, prune
from deltasync.maintenance.retention import Forgetting, Keep, line
from deltasync.maintenance.scan import Progress, attempt, digests, identities, in_parallel, quiet, survey

if TYPE_CHECKING:
    from deltasync.maintenance.compaction import write_compaction
    from deltasync.maintenance.copies import Copied, copy, export
    from deltasync.maintenance.relay import Relay
    from deltasync.maintenance.repairs import Repair, repair, source_of

_HOME = {
    **dict.fromkeys(("Copied", "copy", "export"), "copies"),
    **dict.fromkeys(("Repair", "repair", "source_of"), "repairs"),
    "Relay": "relay",
    "write_compaction": "compaction",
}

__all__ = [
    "Copied",
    "Forgetting",
    "Keep",
    "Progress",
    "Pruned",
    "Relay",
    "Repair",
    "Report",
    "attempt",
    "budget",
    "check",
    "copy",
    "digests",
    "doctor",
    "export",
    "forget",
    "identities",
    "in_parallel",
    "line",
    "prune",
    "quiet",
    "quota",
    "repair",
    "source_of",
    "survey",
    "write_compaction",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deltasync.maintenance' has no attribute {name!r}")
    return getattr(importlib.import_module(f"deltasync.maintenance.{_HOME[name]}"), name)
