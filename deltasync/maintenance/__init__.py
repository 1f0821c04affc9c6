"""Maintain a channel: `gc`, `check` and `repair`, `copy`, `Relay`, `export`, `write_compaction`.

Each function has a `ChannelReader` as its first argument and reports its progress (`reporting`). Modules that hold weights
are imported on first use, so that functions that only read documents do not need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deltasync.maintenance.checks import Report, check
from deltasync.maintenance.joins import check_join, described
from deltasync.maintenance.retention import Collected, KeepPolicy, RetentionPlan, gc, lineage
from deltasync.maintenance.scan import (
    digests,
    exists,
    identities,
    in_parallel,
    progressed,
    reporting,
    result_or_error,
    scan_channel,
)

if TYPE_CHECKING:
    from deltasync.maintenance.compaction import write_compaction
    from deltasync.maintenance.comparison import Comparison, Diff, compare, diff
    from deltasync.maintenance.copies import Copied, copy, export, model_files
    from deltasync.maintenance.history import Change, bisect, blame, matching
    from deltasync.maintenance.relay import Relay
    from deltasync.maintenance.repairs import Repair, repair, source_of

_HOME = {
    **dict.fromkeys(("Copied", "copy", "export", "model_files"), "copies"),
    **dict.fromkeys(("Comparison", "Diff", "compare", "diff"), "comparison"),
    **dict.fromkeys(("Repair", "repair", "source_of"), "repairs"),
    **dict.fromkeys(("Change", "bisect", "blame", "matching"), "history"),
    "Relay": "relay",
    "write_compaction": "compaction",
}

__all__ = [
    "Change",
    "Collected",
    "Comparison",
    "Copied",
    "Diff",
    "KeepPolicy",
    "Relay",
    "Repair",
    "Report",
    "RetentionPlan",
    "bisect",
    "blame",
    "check",
    "check_join",
    "compare",
    "copy",
    "described",
    "diff",
    "digests",
    "doctor",
    "exists",
    "export",
    "gc",
    "heat",
    "identities",
    "in_parallel",
    "lineage",
    "matching",
    "model_files",
    "progressed",
    "repair",
    "reporting",
    "result_or_error",
    "scan_channel",
    "source_of",
    "write_compaction",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deltasync.maintenance' has no attribute {name!r}")
    return getattr(importlib.import_module(f"deltasync.maintenance.{_HOME[name]}"), name)
