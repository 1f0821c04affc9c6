"""What the logs say of the replicas, without a step that waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from deltasync.channel import heartbeat
from deltasync.channel.heartbeat import Heartbeat
from deltasync.errors import DeltaSyncError
from deltasync.stores.base import Store

_LOOK_EVERY_S = 5.0


class Fleet:
    """Looks at the replicas in the background, when somebody asks and the last look is old.

    Args:
        store: The channel's.
        urls: Servers to ask instead of reading heartbeats.
    """

    def __init__(self, store: Store, urls: Sequence[str]) -> None:
        self._store = store
        self._urls = urls
        self._looked_s = -_LOOK_EVERY_S
        self._seen: list[Heartbeat] | None = None

    def metrics(self, run_id: str, newest_version: int, published: Mapping[int, str]) -> dict[str, float]:
        """Replicas that are live, and by how many versions the slowest of them is behind; empty until a look has ended.

        Args:
            run_id: The run whose replicas count.
            newest_version: The one published last.
            published: Digests of our versions, by number. Who serves another version of such a number serves none of ours.
        """
        seen, self._seen = self._seen, None
        if time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            # A daemon, as the process must be able to end while a store hangs.
            threading.Thread(target=self._look, args=(run_id,), name="deltasync-fleet", daemon=True).start()
        if seen is None:
            return {}
        live = [beat for beat in seen if heartbeat.is_live(beat)]
        metrics: dict[str, float] = {"delta_sync/replicas": len(live)}
        if live:
            slowest = min(_served(beat, published) for beat in live)
            metrics["delta_sync/served_lag"] = max(0, newest_version - slowest)
        return metrics

    def _look(self, run_id: str) -> None:
        try:
            self._seen = heartbeat.ask(self._urls, run_id) if self._urls else heartbeat.read_all(self._store, run_id)
        except DeltaSyncError:
            self._seen = None  # the next look may tell


def _served(beat: Heartbeat, published: Mapping[int, str]) -> int:
    """The version that a replica serves, 0 for none. One from before this publisher counts by its number."""
    serving = beat.serving
    if serving is None or published.get(serving.version, serving.sha256) != serving.sha256:
        return 0
    return serving.version
