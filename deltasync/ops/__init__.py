"""Maintain a channel: `gc`, `check` and `repair`, `copy`, `Relay`, `export`, `write_compaction`; and what a
trainer adds beside its versions (`compactor`, `steps`, `watch`). The command line and the dashboard are rooms in this one.

Each function has a `ChannelReader` as its first argument and reports its progress (`reporting`). The names
are imported on first use, so that functions that only read documents do not need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltasync.ops.checks import Report, check
    from deltasync.ops.compaction import write_compaction
    from deltasync.ops.comparison import ChannelComparison, Diff, compare, diff
    from deltasync.ops.copies import Copied, copy, export, model_files
    from deltasync.ops.history import Change, bisect, blame, matching
    from deltasync.ops.joins import check_join, described
    from deltasync.ops.relay import Relay
    from deltasync.ops.repairs import Repair, repair, source_of
    from deltasync.ops.retention import Collected, KeepPolicy, RetentionPlan, gc, lineage
    from deltasync.ops.scan import (
        digests,
        exists,
        identities,
        in_parallel,
        progressed,
        reporting,
        result_or_error,
        scan_channel,
    )

_HOME = {
    **dict.fromkeys(("Report", "check"), "checks"),
    "write_compaction": "compaction",
    **dict.fromkeys(("ChannelComparison", "Diff", "compare", "diff"), "comparison"),
    **dict.fromkeys(("Copied", "copy", "export", "model_files"), "copies"),
    **dict.fromkeys(("Change", "bisect", "blame", "matching"), "history"),
    **dict.fromkeys(("check_join", "described"), "joins"),
    "Relay": "relay",
    **dict.fromkeys(("Repair", "repair", "source_of"), "repairs"),
    **dict.fromkeys(("Collected", "KeepPolicy", "RetentionPlan", "gc", "lineage"), "retention"),
    **dict.fromkeys(
        (
            "digests",
            "exists",
            "identities",
            "in_parallel",
            "progressed",
            "reporting",
            "result_or_error",
            "scan_channel",
        ),
        "scan",
    ),
}

__all__ = [
    "Change",
    "ChannelComparison",
    "Collected",
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
    "cli",
    "compactor",
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
        raise AttributeError(f"module 'deltasync.ops' has no attribute {name!r}")
    return getattr(importlib.import_module(f"deltasync.ops.{_HOME[name]}"), name)
