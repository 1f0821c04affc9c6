"""The maintenance of a channel, as its publisher knows it. `ops.compactor` does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deltasync.channel.documents import File
from deltasync.channel.record import StoredRecord
from deltasync.publish.pending import Pending
from deltasync.tensors import Delta, Layout


class Maintenance:
    """Maintains nothing. A subclass helps late joiners and deletes what is not kept, in threads of its own.

    No version depends on it. Only `close` waits for the store.
    """

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return False

    def replay(
        self, layout: Layout, ranges: Mapping[str, tuple[int, int]], base: int
    ) -> Callable[[Delta], None]:
        """Return what takes, in order, the deltas that a resumed run reads, from the full weights of version
        `base` on. They have elements of these ranges only.
        """
        return lambda delta: None

    def is_due(self, version: int) -> bool:
        """Whether the ranks have to collect full weights with a version, for an anchor beside it."""
        return False

    def plan(self, job: Pending, put: Callable[[str, bytes], File], base: int | None = None) -> int | None:
        """Decide what to store beside a delta that is about to be uploaded. May set `job.weights`.

        `put` stores a file in the version's folder. Returns the base of a compaction that the other ranks
        store parts of; these are given it as `base`.
        """
        return None

    def stored(self, job: Pending, record: StoredRecord | None, *, is_visible: bool = True) -> None:
        """Note the next version, and begin what was planned. `is_visible`: the store has answered.

        Takes the weights of a job that is no full one. Other ranks know no `record`.
        """

    def published(self, version: int) -> None:
        """Note that the receipts of a version were told that it is visible."""

    def not_published(self) -> None:
        """Note that a version could not be stored."""

    def close(self) -> None:
        """Finish what is under way."""

    def look_at_end(self) -> None:
        """Say what is known to be wrong as the process ends. Asks no store."""
