"""Looking after a channel: `forget` and `prune`, `check` and `repair`, `copy`, `Relay`, `export`, `write_fold`.

Each takes a `ChannelReader` and reports progress through a callback; what takes long reads with a few threads. Names are
imported on first use, so that what only reads documents needs neither torch nor numba.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltasync.housekeeping.folds import write_anchor, write_fold
    from deltasync.housekeeping.mend import Repair, Repaired, repair, source_of
    from deltasync.housekeeping.relay import Relay
    from deltasync.housekeeping.retention import Forgetting, Keep, line
    from deltasync.housekeeping.sweep import GRACE_S, Pruned, forget, prune
    from deltasync.housekeeping.transfer import Copied, copy, export
    from deltasync.housekeeping.verify import Report, check
    from deltasync.housekeeping.walk import Progress, Survey, identities, in_parallel, quiet, survey

_HOME = {
    "Copied": "transfer",
    "Forgetting": "retention",
    "GRACE_S": "sweep",
    "Keep": "retention",
    "Progress": "walk",
    "Pruned": "sweep",
    "Relay": "relay",
    "Repair": "mend",
    "Repaired": "mend",
    "Report": "verify",
    "Survey": "walk",
    "check": "verify",
    "copy": "transfer",
    "export": "transfer",
    "forget": "sweep",
    "identities": "walk",
    "in_parallel": "walk",
    "line": "retention",
    "prune": "sweep",
    "quiet": "walk",
    "repair": "mend",
    "source_of": "mend",
    "survey": "walk",
    "write_anchor": "folds",
    "write_fold": "folds",
}

__all__ = [
    "GRACE_S",
    "Copied",
    "Forgetting",
    "Keep",
    "Progress",
    "Pruned",
    "Relay",
    "Repair",
    "Repaired",
    "Report",
    "Survey",
    "check",
    "copy",
    "doctor",
    "export",
    "forget",
    "identities",
    "in_parallel",
    "line",
    "prune",
    "quiet",
    "repair",
    "source_of",
    "survey",
    "write_anchor",
    "write_fold",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deltasync.housekeeping' has no attribute {name!r}")
    return getattr(importlib.import_module(f"deltasync.housekeeping.{_HOME[name]}"), name)
