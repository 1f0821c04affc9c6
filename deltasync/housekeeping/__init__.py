"""Looking after a channel: `forget` and `prune`, `check` and `repair`, `copy`, `export`, `write_fold`.

Each takes a `ChannelReader` and reports progress through a callback; what takes long reads with a few threads.
"""

from __future__ import annotations

from deltasync.housekeeping.retention import Forgetting, Keep
from deltasync.housekeeping.survey import Progress, Survey, quiet, survey
from deltasync.housekeeping.sweep import GRACE_S, Pruned, forget, prune

__all__ = ["GRACE_S", "Forgetting", "Keep", "Progress", "Pruned", "Survey", "forget", "prune", "quiet", "survey"]
