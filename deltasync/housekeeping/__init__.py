"""Looking after a channel: `forget`, `prune`, `check`, `copy`, `export`, `write_fold`.

Each takes a `ChannelReader` and reports progress through a callback; what takes long reads with a few threads.
"""

from __future__ import annotations

from deltasync.housekeeping.folds import store_fold, write_fold
from deltasync.housekeeping.survey import Progress, quiet, read_folds, read_manifests
from deltasync.housekeeping.sweep import Pruned, forget, prune
from deltasync.housekeeping.transfer import Copied, copy, export
from deltasync.housekeeping.verify import Report, check

__all__ = [
    "Copied",
    "Progress",
    "Pruned",
    "Report",
    "check",
    "copy",
    "export",
    "forget",
    "prune",
    "quiet",
    "read_folds",
    "read_manifests",
    "store_fold",
    "write_fold",
]
