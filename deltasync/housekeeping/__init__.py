"""Looking after a channel: `forget` and `prune`, `check` and `repair`, `copy`, `export`, `write_fold`.

Each takes a `ChannelReader` and reports progress through a callback; what takes long reads with a few threads.
"""

from __future__ import annotations

from deltasync.housekeeping.folds import write_anchor, write_fold
from deltasync.housekeeping.repair import Repair, Repaired, repair, source_of
from deltasync.housekeeping.retention import Forgetting, Keep
from deltasync.housekeeping.survey import Progress, Survey, identities, in_parallel, line, quiet, survey
from deltasync.housekeeping.sweep import GRACE_S, Pruned, forget, prune
from deltasync.housekeeping.transfer import Copied, copy, export
from deltasync.housekeeping.verify import Report, check

__all__ = [
    "GRACE_S",
    "Copied",
    "Forgetting",
    "Keep",
    "Progress",
    "Pruned",
    "Repair",
    "Repaired",
    "Report",
    "Survey",
    "check",
    "copy",
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
