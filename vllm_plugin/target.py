"""vLLM's workers as a target of the follow loop (`deltasync.following.Follow`).

    stage -> (poll) -> pause, commit, announce, resume      in one call to the engine (`Client.exchange`)

The loop runs in a thread of vLLM's API server and hands the workers the records that it has read, so all of them take the
same chain, and a small version costs one request. Workers stage while tokens are generated; the pause covers the commit
only. If a commit leaves unknown bits, generation stays paused until an audit identifies them or full weights replace them.
If another client has paused generation, it stays paused. While vLLM sleeps, nothing is touched.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np

from deltasync import limits
from deltasync.channel import payloads
from deltasync.channel.documents import VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.config import ReplicaSettings
from deltasync.errors import DeltaSyncError
from deltasync.following import Commit, Follow, Identify
from deltasync.following.engine import Failure, open_reader, unique_name
from deltasync.following.metrics import Metrics, total
from deltasync.following.shard import handed
from deltasync.following.shards import commit_of
from deltasync.stores.cache import CachedStore
from vllm_plugin import logger
from vllm_plugin.workers import Client, WorkerShards

_SURE_S = 10.0  # between calls of idle workers: with several, vLLM keeps a core of each busy for a second after a call


def generated_tokens() -> int:
    """Return the tokens that vLLM has generated since the server started, by its own metric."""
    return total("vllm:generation_tokens_total")


def running_requests() -> int:
    """Return the requests in flight at the last engine step, by vLLM's own metric."""
    return total("vllm:num_requests_running")


class LiveVersions:
    """The numbers of the versions that were live, in order: which of them were while a request ran.

    Several API servers share them in a file. One of them writes.
    """

    def __init__(self) -> None:
        self._numbers = np.zeros(2 + 2 * limits.HISTORY, np.int64)  # how many were noted, `was_ready`, a ring; 0: no version

    def share(self, path: str) -> None:
        """Keep the numbers in this file from now on, which may have some."""
        with open(path, "a+b") as file:
            file.truncate(self._numbers.nbytes)
        self._numbers = np.memmap(path, np.int64)

    def expect(self, number: int) -> None:
        """Note that a version may be live before `note` says so: replies that begin or end until then may have it."""
        self._add(number, int(self._numbers[self._place(self.mark)]))

    def note(self, number: int | None) -> None:
        """Note that another version is live; None for no version of the channel."""
        self._add(number or 0)

    def _add(self, *numbers: int) -> None:
        for at, number in enumerate(numbers, self.mark + 1):
            self._numbers[self._place(at)] = number
        self._numbers[0] = self.mark + len(numbers)

    def _place(self, mark: int) -> int:
        return 2 + mark % (len(self._numbers) - 2)

    @property
    def was_ready(self) -> bool:
        """Whether requests may be answered, because the server was ready once; `ready` sets it."""
        return bool(self._numbers[1])

    def ready(self) -> None:
        """Set `was_ready`, for ever."""
        self._numbers[1] = 1

    @property
    def now(self) -> int | None:
        """The number of the version that is live."""
        return int(self._numbers[self._place(self.mark)]) or None

    @property
    def mark(self) -> int:
        """What `since` takes, to tell which versions were live from now on."""
        return int(self._numbers[0])

    def since(self, mark: int) -> tuple[int, int] | None:
        """Return the least and the greatest version that were live since a mark; None if none was."""
        last = self.mark
        marks = np.arange(max(mark, last + 3 - len(self._numbers)), last + 1)
        numbers = self._numbers[2 + marks % (len(self._numbers) - 2)]
        live = numbers[numbers > 0]
        return (int(live.min()), int(live.max())) if len(live) else None


class EngineTarget:
    """The weights of one server's workers, which `client` reaches.

    Attributes:
        version: The version that generates tokens, None before the first. Changes only while generation is paused.
        live: Its history.
        workers: The workers.
        client: How it pauses generation.
    """

    def __init__(
        self, client: Client, reader: ChannelReader, settings: ReplicaSettings, metrics: Metrics, live: LiveVersions
    ) -> None:
        self.version: VersionId | None = None
        self.live = live
        self.client, self.workers = client, WorkerShards(client, reader)
        self._reader, self._settings, self._metrics = reader, settings, metrics
        self._is_committing = False
        self._is_asleep = False
        self._tokens_before = 0  # tokens that were generated before staging began
        self._sure_s = -math.inf  # when the workers last knew their bits
        self._names: OrderedDict[int, str] = OrderedDict()  # the first digest that was served of each number

    @property
    def progressed_s(self) -> float:
        """As `Target.progressed_s`."""
        return self.workers.progressed_s

    @property
    def ignored(self) -> Sequence[str]:
        """As `Target.ignored`."""
        return self.workers.ignored

    def open(self, identify: Identify) -> None:
        """Learn what the workers hold, prove it, and identify the version."""
        keys = self._settings.trusted_keys
        assert self._settings.channel is not None
        found = identify(self.workers.open(self._settings.channel, None if keys is None else str(keys)))
        self.workers.identified(None if found is None else handed([found])[0])
        if found is not None:
            self._announce(found.version)
            logger.info("deltasync serves version=%d, which is what vLLM has loaded", found.version.version)

    def is_settled(self, asked: bool) -> bool:
        """Whether the workers know which bits they hold: asked after what may change that, and else every `_SURE_S`."""
        if self.client.held:
            return False
        now_s, is_idle = time.monotonic(), not (asked or self.client.used or self._is_asleep)
        if is_idle and now_s - self._sure_s < _SURE_S:
            return True
        self._sure_s, self.client.used, self._is_asleep = -math.inf, False, True  # until the workers have answered
        settled = all(self.workers.every(bool, "settled"))
        self._is_asleep = False
        if settled:
            self._sure_s = now_s
        return settled

    def settle(self) -> None:
        """Audit the live bits, and announce which version they are."""
        identity = self.workers.settle()
        if identity != self.version:
            self._announce(identity)
        if identity is not None:
            self.client.release()

    def _announce(self, version: VersionId | None) -> None:
        """Tell vLLM which version is live, which labels tokens and keeps the prefix cache apart."""
        self.client.announce("unknown" if version is None else unique_name(self._names, version))
        self._note(version)

    def _note(self, version: VersionId | None) -> None:
        self.live.note(None if version is None else version.version)
        self.version = version  # at last, because requests wait for it

    def stage(self, chain: Sequence[StoredRecord]) -> Sequence[StoredRecord] | None:
        """Have the workers stage a chain. Returns None if one does not know its bits."""
        self._sure_s = -math.inf
        self._tokens_before = generated_tokens()
        try:
            return chain if self.workers.stage(handed(chain)) else None
        except DeltaSyncError as error:
            reference = chain[0].record.reference
            if reference is None or self.version is not None:
                raise
            unlike = payloads.unlike(self._reader, reference, self.workers.fingerprints)
            said = Failure.of(error)
            raise msgspec.structs.replace(said, message=f"{said.message} {unlike}").error() from error

    def commit(self, staged: Sequence[StoredRecord]) -> Commit:
        """Pause, commit, compare the bits with the published fingerprints, announce, resume."""
        running, version = running_requests(), staged[-1].version
        self._is_committing = True
        try:
            with self._metrics.attempt(lambda: self.client.last_s), self.client.committing():
                self.live.expect(version.version)
                done = self.workers.commit(unique_name(self._names, version))
                self._note(version)
        finally:
            self._is_committing = False
        self._sure_s = time.monotonic()
        tokens = generated_tokens() - self._tokens_before
        return commit_of(staged, done, pause_s=self.client.last_s, running_requests=running, tokens_during_sync=tokens)

    def digest(self) -> dict[str, str]:
        """As `Shards.digest`."""
        return self.workers.digest()

    def close(self) -> None:
        """Give up what is being staged; a commit goes on to its end."""
        if not self._is_committing:
            self.workers.closed = True
            self.client.cancel()


def open_follow(client: Client, settings: ReplicaSettings, metrics: Metrics, live: LiveVersions | None = None) -> Follow:
    """Make the follow loop of one server's workers, which follows `settings.channel` once it is started."""
    reader = open_reader(settings)
    target = EngineTarget(client, reader, settings, metrics, live or LiveVersions())
    prefetch = isinstance(reader.store, CachedStore)  # workers only have the cache in common
    return Follow(reader, target, settings, observer=metrics, prefetch=prefetch, log=logger)
