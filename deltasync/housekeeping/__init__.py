"""Look after a channel: `forget` and `prune`, `check` and `repair`, `copy`, `Relay`, `export`, `write_fold`.

Each takes a `ChannelReader` and reports progress through a callback. What holds weights is imported on first use, so that
what only reads documents needs neither torch nor numba.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from deltasync.housekeeping.retention import Forgetting, Keep, line
from deltasync.housekeeping.sweep import Pruned, forget, prune
from deltasync.housekeeping.verify import Report, check
from deltasync.housekeeping.walk import Progress, attempt, digests, identities, in_parallel, quiet, survey

if TYPE_CHECKING:
    from deltasync.housekeeping.folds import write_fold
    from deltasync.housekeeping.mend import Repair, repair, source_of
    from deltasync.housekeeping.relay import Relay
    from deltasync.housekeeping.transfer import Copied, copy, export

_HOME = {
    **dict.fromkeys(("Copied", "copy", "export"), "transfer"),
    **dict.fromkeys(("Repair", "repair", "source_of"), "mend"),
    "Relay": "relay",
    "write_fold": "folds",
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
    "write_fold",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deltasync.housekeeping' has no attribute {name!r}")
    return getattr(importlib.import_module(f"deltasync.housekeeping.{_HOME[name]}"), name)
