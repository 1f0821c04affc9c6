"""Create-if-absent where the server has none: `LeasedStore`, by claims.

A writer claims the store, waits until its claim has settled, and creates as long as nobody has claimed after it:

    claims/<number>-<digits>    one for each writer; the greatest one counts

    look at the claims, claim a greater number, wait `settle_s`
    for each object:  is the key free?  is this claim there, and no greater one?  put; if that took long, look again

**The assumption:** a listing shows a claim, and a request that was sent has taken its effect or never will, within
`settle_s - recheck_s`. Where it fails, an object may be replaced after a greater claim; its writer is told that it
was too late, or never hears of it.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time

from deltasync.errors import FencedError, ObjectExistsError, TransientStoreError
from deltasync.stores.base import Store, WrappedStore
from deltasync.stores.retries import holds
from deltasync.threads import Workers

logger = logging.getLogger(__name__)

CLAIMS = "claims/"
_CLAIM = re.compile(r"claims/([0-9]{10})-[0-9a-f]{8}")


def boot_s() -> float:
    """Return seconds by a clock that counts suspension too; by the wall clock where there is none."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.time()


class LeasedStore(WrappedStore):
    """A store that can `create`, around one that cannot. All writers of a channel must use it, or none.

    Args:
        inner: The store. If it has `upload(data)`, that sends the bytes which `put` stores next, while the claims
            are looked at.
        settle_s: How long a new writer waits for requests of the one before.
        recheck_s: How long a writer may rely on a look at the claims.
    """

    def __init__(self, inner: Store, settle_s: float = 30.0, recheck_s: float = 5.0) -> None:
        super().__init__(inner)
        assert settle_s > recheck_s
        self.settle_s, self._recheck_s = settle_s, recheck_s
        self._claim, self._claimed_s = "", 0.0
        self._creating = threading.Lock()

    @property
    def can_create(self) -> bool:
        return True

    def claim(self) -> None:
        """Claim the store, unless that was done. It settles while the caller does other things.

        Raises:
            StoreError: it may be claimed or not. The next call, or `create`, goes on.
        """
        if not self._claim:
            newest = max((int(claim[len(CLAIMS) :][:10]) for claim in self._claims()), default=0)
            self._claim = f"{CLAIMS}{newest + 1:010d}-{secrets.token_hex(4)}"
        if not self._claimed_s:
            self.inner.put(self._claim, self._claim.encode())
            self._claimed_s = boot_s()

    def create(self, key: str, data: bytes) -> None:
        """Put an object that is not there, once the claim has settled. See `Store.create`.

        Raises:
            FencedError: another writer has claimed the store. The object may be stored; nothing may build on it.
        """
        with self._creating:
            self._create(key, data)

    def _create(self, key: str, data: bytes) -> None:
        self.claim()
        ready = Workers(1, "fetch").submit(self._check, key, data)
        if (upload := getattr(self.inner, "upload", None)) is not None:
            upload(data)
        looked_s = ready.result()
        if not self._is_recent(looked_s):
            looked_s = self._look()
            if not self._is_recent(looked_s):
                raise TransientStoreError(
                    f"{self.url}: a look at {CLAIMS} took more than {self._recheck_s:g} s; nothing was sent."
                )
        self.inner.put(key, data)
        if not self._is_recent(looked_s):
            try:
                self._look()
            except FencedError as error:
                logger.error("%s was stored too late and does not count: %s", key, error)
                raise

    def _check(self, key: str, data: bytes) -> float:
        """Return when a look at the claims began that came after one at the key. Raises as `create`."""
        left_s = min(self._claimed_s + self.settle_s - boot_s(), self.settle_s)
        if left_s > 0:
            logger.info("waiting %.1f s for requests of other publishers", left_s)
            time.sleep(left_s)
        is_free = holds(self.inner, key, data) is None
        looked_s = self._look()
        if not is_free:
            raise ObjectExistsError(f"{self.url}/{key} already exists.")
        return looked_s

    def _look(self) -> float:
        """Raise FencedError if there is a greater claim; return when this look began, by `boot_s`.

        Raises:
            TransientStoreError: the listing lacks this claim, so that it may lack others.
        """
        began_s, claims = boot_s(), self._claims()
        newest, number = max(claims, default=""), self._claim.partition("-")[0]
        is_gone = self._claim not in claims and holds(self.inner, self._claim, self._claim.encode()) is None
        # where the store was restored from a backup, the one of two equal numbers that is there came later
        if newest > (number if is_gone else self._claim):
            raise FencedError(
                f"Another publisher has claimed {self.url} ({newest}) after this one ({self._claim})."
            )
        if is_gone:
            self._claimed_s = 0.0  # the next attempt claims again
        if self._claim not in claims:
            raise TransientStoreError(f"{self.url} does not list {self._claim}; nothing was sent.")
        return began_s

    def _is_recent(self, looked_s: float) -> bool:
        """Whether a look still counts. One in the future does not: the clock was set back."""
        return 0 <= boot_s() - looked_s <= self._recheck_s

    def _claims(self) -> list[str]:
        return [info.key for info in self.inner.list(CLAIMS) if _CLAIM.fullmatch(info.key)]
