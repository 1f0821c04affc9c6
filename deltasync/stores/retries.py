"""Trying again: the one loop for requests that may fail once and not the next time."""

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


def retried(
    action: Callable[[], _Result],
    retries: int,
    delay_s: float = 0.0,
    *,
    passing: tuple[type[DeltaSyncError], ...] = (TransientStoreError,),
    level: int = logging.WARNING,
) -> _Result:
    """The result of `action`, which is run again after errors that may pass.

    Args:
        action: Safe to repeat.
        retries: Attempts after the first one.
        delay_s: Longest wait before the first of them, doubled each time, at most 30 s; each is shortened by up to a half
            at random, so that those who failed together do not come back together.
        passing: The errors.
        level: Each of them is logged so.
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
