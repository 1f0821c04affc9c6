"""Which requests to stores are retried, and how."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from deltasync.errors import DeltaSyncError, TransientStoreError

logger = logging.getLogger(__name__)

_LONGEST_DELAY_S = 30.0

_Result = TypeVar("_Result")


def may_pass(status: int) -> bool:
    """Whether a request that was answered with this HTTP status may succeed later."""
    return status in (408, 425, 429) or (status >= 500 and status not in (501, 505, 507))  # not implemented; no more room


def retried(
    action: Callable[[], _Result],
    retries: int,
    delay_s: float = 0.0,
    *,
    passing: tuple[type[DeltaSyncError], ...] = (TransientStoreError,),
    level: int = logging.WARNING,
) -> _Result:
    """Return the result of `action`, which is run again after errors that may pass.

    Args:
        action: Safe to repeat.
        retries: Attempts after the first one.
        delay_s: Longest wait before the first retry; doubled each time, at most 30 s. Each wait is shortened by up to half
            at random, so that clients that failed together do not retry together.
        passing: Errors after which to retry.
        level: Level at which these errors are logged.
    """
    for left in range(retries, 0, -1):
        try:
            return action()
        except passing as error:
            wait_s = delay_s * random.uniform(0.5, 1.0)
            logger.log(level, "%s Trying again in %.2f s (%d left).", error, wait_s, left)
            time.sleep(wait_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
    return action()
