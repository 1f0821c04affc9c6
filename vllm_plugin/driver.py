"""The driver: one task in vLLM's API server that follows the channel and has the workers stage and commit.

    way -> stage -> (poll) -> pause_generation(keep) -> commit -> [confirm] -> update_weight_version -> resume_generation

Only the driver polls and plans (`deltasync.follow.Course`). It hands the workers the records that it has read, so all of
them take the same way, and a small version costs one request. Workers stage while tokens are generated; the pause covers the
commit only. If either fails, the old version stays served, and the next look tries again, by another way if the way was at
fault. If a commit leaves unknown bits, generation stays paused until an audit identifies them or full weights replace them.
If another client has paused generation, it stays paused. While vLLM sleeps, nothing is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import msgspec

from deltasync.channel import heartbeat, payloads
from deltasync.channel.documents import Version
from deltasync.channel.nearest import open_nearest
from deltasync.channel.plan import payload_bytes
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.config import ReplicaSettings
from deltasync.errors import (
    ApplyError,
    CommitError,
    DeltaSyncError,
    FingerprintMismatchError,
    NotPublishedError,
    SleepingError,
    printable,
)
from deltasync.follow import NEWEST, Course, Pin, Poll
from deltasync.stores import ObjectInfo
from deltasync.stores.cache import CachedStore, behind_cache
from vllm_plugin import logger
from vllm_plugin.background import Beats, Scout
from vllm_plugin.messages import Commit, CommitReply, Failure, Status
from vllm_plugin.metrics import Metrics, generated_tokens, running_requests
from vllm_plugin.pauses import Pauses
from vllm_plugin.workers import Workers

HISTORY = 4096
"""How many commits the status keeps."""

STALE_S, STALE_POLLS = 60.0, 20
"""A server is stale when its last good look is older than so many seconds, and than so many poll intervals."""

_SURE_S = 10.0  # between calls of idle workers: with several, vLLM keeps a core of each busy for a second after a call

_DETOURS = 8  # failed looks after which `look_until_done` gives up: each may take another way


class Driver:
    """Follows one channel for one server. `engine` is vLLM's engine client, or an `IdleEngine`.

    Attributes:
        pin: Which versions it takes. May be set while it follows.
        pauses: How it pauses generation.
        identity: The version that generates tokens, None before the first. Changes only while generation is paused.
        commits: The last `HISTORY` commits.
    """

    def __init__(self, engine: Any, settings: ReplicaSettings, metrics: Metrics) -> None:
        assert settings.channel is not None
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._channel = settings.channel
        store = behind_cache(open_nearest(settings.channel), settings.cache_dir, settings.cache_bytes)
        self._reader = ChannelReader(store, settings.trusted_keys)
        prefetch = settings.adapter is not None or isinstance(store, CachedStore)  # workers only have the cache in common
        self._course = Course(self._reader, settings.max_age_s, prefetch)
        self.pin = Pin.parse(settings.pin)
        self._scout = Scout(self._course)
        self._workers = Workers(engine, self._reader)
        self.pauses = Pauses(engine)
        self._beats = Beats(store, settings.heartbeat_interval_s)
        self.identity: Version | None = None
        self._step: int | None = None  # the trainer's, of the last version
        self.commits: deque[Commit] = deque(maxlen=HISTORY)
        self._state = "waiting"
        self._error: str | None = "Waiting for the first look at the channel."
        self._opened = False
        self._served_s = self._audited_s = 0.0
        self._sure_s = -math.inf  # when the workers last knew their bits
        self._names: OrderedDict[int, str] = OrderedDict()  # the first digest that was served of each number
        self._busy = asyncio.Lock()
        self._wake = asyncio.Event()  # look now
        self._looked = asyncio.Event()  # the current or next look has ended; replaced after each look
        self._begun = 0  # number of looks
        self._caught_up = -1  # number of the last look that found nothing to take

    @property
    def version(self) -> int | None:
        """The number of the version served."""
        return None if self.identity is None else self.identity.version

    @property
    def caught_up(self) -> bool:
        """Whether the last look found nothing to take."""
        return self._caught_up == self._begun

    @property
    def _newest(self) -> int | None:
        return None if self._course.newest is None else self._course.newest.version

    @property
    def _last_look_s_ago(self) -> float | None:
        """Seconds since the store last answered a look."""
        return None if self._course.looked_s is None else time.monotonic() - self._course.looked_s

    @property
    def _stale(self) -> str | None:
        """Return since when the channel could not be read, in one sentence, or None if that is not long."""
        limit_s = max(STALE_S, STALE_POLLS * self._settings.poll_interval_s)
        since_s = min(self._last_look_s_ago or 0.0, time.monotonic() - self._served_s)
        if self.identity is None or self._state not in ("serving", "failed") or since_s <= limit_s:
            return None
        return f"The last good look at the channel was {since_s:.0f} s ago. {self._error or ''}".rstrip()

    @property
    def not_ready(self) -> str | None:
        """Why this server should get no requests, in one sentence; None if it serves a version that is new enough."""
        served, newest = self.version, self._newest
        if served is None or newest is None:
            return f"This server serves no version of {self._reader.store.url} yet. {self._error or ''}".rstrip()
        if self._state == "sleeping" or self.pauses.held:
            return f"This server does not generate now. {self._error or ''}".rstrip()
        if not self.pin.is_near(served, newest, self._settings.ready_behind):
            where = f"{newest - served} behind" if self.pin == NEWEST else f"and is pinned ({self.pin}); the newest is"
            return f"This server serves version {served}, {where} version {newest}."
        return self._stale

    def status(self, commit_count: int = HISTORY) -> Status:
        """Return the reply of `GET /deltasync/status`, with the last `commit_count` commits."""
        stale, identity, workers = self._stale, self.identity, self._workers
        return Status(
            replica_id=self._settings.replica_id,
            channel=self._reader.store.url,
            run_id=self._reader.run_id,
            state=self._state if stale is None else "stale",
            version=self.version,
            epoch=None if identity is None else identity.epoch,
            sha256=None if identity is None else identity.sha256,
            newest_version=self._newest,
            pin=None if self.pin == NEWEST else str(self.pin),
            last_look_s_ago=self._last_look_s_ago,
            error=self._error if stale is None else stale,
            kv_cache=self._settings.kv_cache,
            trusted_keys=None if self._reader.trusted is None else self._reader.trusted.names,
            patched_tensors=len(self._reader.specs) - workers.reloaded_count if self._opened else None,
            reloaded_tensors=workers.reloaded_count if self._opened else None,
            reloaded=workers.reasons,
            commits=list(self.commits)[-commit_count:] if commit_count else [],
        )

    async def reach(self, version: int | None, step: int | None = None) -> int:
        """Look at the channel now, and wait until a version or a later one is served. Returns the version served.

        Args:
            version: Its number; None for the newest that is published now, or the first if there is none.
            step: The trainer's step to wait for instead.
        """
        begun = self._begun
        self._scout.is_asked = True
        self._wake.set()
        while True:
            served = self.version
            if step is not None:
                reached = self._step is not None and self._step >= step
            else:
                reached = self._caught_up > begun if version is None else served is not None and served >= version
            if served is not None and reached:
                return served
            await self._looked.wait()

    async def digest(self) -> dict[str, Any]:
        """Return the version served, and the sha256 of every tensor in live memory, put together from all workers' shards.

        Raises:
            ApplyError: two workers hold different copies of the same elements.
        """
        async with self._busy:
            return {"version": self.version, "sha256": await self._workers.digest()}

    async def run(self) -> None:
        """Follow the channel until cancelled."""
        url, name, loop = self._reader.store.url, self._settings.replica_id, asyncio.get_running_loop()
        logger.info("deltasync follows %s (%s) as %s; versions and replicas: deltasync watch %s", url, self.pin, name, url)

        def on_change(info: ObjectInfo | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is about to end
                loop.call_soon_threadsafe(self._changed, info)

        with Poll(self._reader.store, self._settings.poll_interval_s, on_change) as poll:
            self._scout.poll = poll
            while True:
                self._wake.clear()
                before = self.identity
                await self.look()
                self._beats.tell(self.status(0))
                moved, settled = self.identity != before, self._state in ("serving", "waiting")
                # Not `wait_for`, which may keep a cancellation to itself.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(poll.delay_s(moved, settled)):
                        await self._wake.wait()

    def _changed(self, info: ObjectInfo | None) -> None:
        self._scout.known = info
        self._wake.set()

    async def stop(self) -> None:
        """Write the last heartbeat, which says that this server has ended in order. Call when `run` has ended."""
        self._state, self._error = heartbeat.STOPPED, None
        await self._beats.stop(self.status(0))

    async def look_until_done(self, pin: Pin | None = None, deadline: float = math.inf) -> None:
        """Look until nothing is left to take, or looking does not help; `status` tells which. Replaces `run`.

        Stops at the deadline, by `time.monotonic`, unless the bits of the weights are unknown.
        """
        failed = 0
        while True:
            await self.look(pin, asked=not failed)
            failed += self._state == "failed"
            if self.caught_up or self._state in ("waiting", "sleeping") or failed > _DETOURS:
                return
            if time.monotonic() > deadline and not self.pauses.held:
                return

    async def look(self, pin: Pin | None = None, *, asked: bool = False) -> None:
        """Look at the channel, take one step towards the pin (the driver's own by default), and report the result.

        If somebody `asked` for a version, records that were damaged before are tried again.
        """
        self._begun += 1
        self._scout.is_asked |= asked
        try:
            if await self._follow_once(self.pin if pin is None else pin):
                self._caught_up = self._begun
        except NotPublishedError as error:
            self._report("waiting", f"Waiting for the first version: {error}")
        except SleepingError as error:
            self._course.follows_s = time.time()
            self._report("sleeping", str(error))
        except DeltaSyncError as error:
            self._metrics.failed(error)
            self._report("failed", f"{type(error).__name__}: {error}")
        except Exception as error:  # the server goes on with the weights it has, and says why
            self._metrics.failed(error)
            message = printable(f"Unexpected {type(error).__name__}: {error}")
            if message != self._error:
                logger.exception("deltasync failed unexpectedly")
            self._report("failed", message)
        self._metrics.looked(self.version, self._newest, self._last_look_s_ago)
        self._looked.set()
        self._looked = asyncio.Event()

    async def _follow_once(self, pin: Pin) -> bool:
        """Take the next step. Returns whether there was nothing to take."""
        async with self._busy:
            if not self._opened:
                await self._open()
            elif self.pauses.held or not await self._settled():
                await self._settle()
        way = await self._scout.next(self.identity, pin)
        async with self._busy:
            if not way:
                await self._audit_if_due()
                self._report("serving", self._course.problem)
                return True
            tokens_before = generated_tokens()
            if await self._stage(way):
                await self._commit(way, tokens_before)
        return False

    async def _settled(self) -> bool:
        """Whether the workers know which bits they hold: asked after what may change that, and else every `_SURE_S`."""
        now_s, is_idle = time.monotonic(), self._state != "sleeping" and not self._scout.is_asked and not self.pauses.used
        if is_idle and now_s - self._sure_s < _SURE_S:
            return True
        self._sure_s, self.pauses.used = -math.inf, False
        settled = await self._workers.settled()
        if settled:
            self._sure_s = now_s
        return settled

    async def _open(self) -> None:
        """Learn what the workers hold, prove it, and identify the version."""
        await self._scout.ask("published", self._check_published)
        keys = self._settings.trusted_keys
        total = await self._workers.open(self._channel, None if keys is None else str(keys))
        self._audited_s = time.monotonic()
        found: Stored | None = await self._scout.ask(("identify", total), lambda: self._course.identify(total))
        await self._workers.identified(found)
        if found is not None:
            await self._announce(found.version)
            self._step = found.record.step
            logger.info("deltasync serves version=%d, which is what vLLM has loaded", found.version.version)
        self._opened = True

    def _check_published(self) -> None:
        self._reader.channel()
        if self._reader.head() is None and self._reader.newest() is None:
            raise NotPublishedError(f"{self._reader.store.url} holds no version yet.")

    async def _audit_if_due(self) -> None:
        """Raise ApplyError if bits in memory changed by themselves. The next look then loads full weights."""
        interval_s, before = self._settings.audit_interval_s, self.version
        if interval_s and time.monotonic() - self._audited_s >= interval_s:
            await self._settle()
            if self.identity is None:
                raise ApplyError(f"The weights in memory were not those of version {before} any more; loading full weights.")

    async def _settle(self) -> None:
        """Audit the live bits, and announce which version they are."""
        identity = await self._workers.settle()
        self._audited_s = time.monotonic()
        if identity != self.identity:
            self._scout.acquit()
            await self._announce(identity)
        if identity is not None:
            await self.pauses.release()

    async def _announce(self, version: Version | None) -> None:
        """Tell vLLM which version is live, which labels tokens and keeps the prefix cache apart."""
        await self._engine.update_weight_version("unknown" if version is None else self._name(version))
        self.identity, self._served_s = version, time.monotonic()

    def _name(self, version: Version) -> str:
        """Return a version's number, with the start of its digest if another version of that number was served before."""
        first = self._names.setdefault(version.version, version.sha256)
        if len(self._names) > HISTORY:
            self._names.popitem(last=False)
        return str(version.version) if first == version.sha256 else f"{version.version}-{version.sha256[:12]}"

    async def _stage(self, way: Sequence[Stored]) -> bool:
        """Have the workers stage a way. Returns False if one does not know its bits, which the next look settles."""
        self._state, self._sure_s = "staging", -math.inf
        replies = await self._workers.stage(way)
        failures = [reply.failure for reply in replies if reply.failure is not None]
        if not failures:
            return all(reply.state == "staged" for reply in replies)
        failure = failures[0]
        blamed = [reply.blamed for reply in replies if reply.blamed is not None]
        self._scout.failed((way, blamed[0], failure.message) if blamed else None)
        reference = way[0].record.reference
        if reference is not None and self.identity is None:
            unlike = payloads.unlike(self._reader, reference, self._workers.fingerprints)
            failure = Failure(failure.kind, f"{failure.message} {unlike}")
        raise failure.error()

    async def _commit(self, way: Sequence[Stored], tokens_before: int) -> None:
        """Pause, commit, compare the bits with the published fingerprints, announce, resume."""
        self._state = "committing"
        running = running_requests()
        try:
            async with self.pauses.paused(self._settings.kv_cache == "recompute"):
                done = await self._workers.commit()
                await self._announce(way[-1].version)
        except DeltaSyncError as error:
            self._scout.failed((way, None, error) if isinstance(error, FingerprintMismatchError) else None)
            if not isinstance(error, CommitError):
                self._metrics.rollbacks.inc()
            raise
        finally:
            self._metrics.pause.observe(self.pauses.last_s)
        self._sure_s = time.monotonic()
        self._committed(way, done, generated_tokens() - tokens_before, running, self.pauses.last_s)
        self._report("serving", None)

    def _committed(self, way: Sequence[Stored], done: CommitReply, tokens: int, running: int, pause_s: float) -> None:
        """Record a commit in the status, the metrics and the log."""
        self._step = way[-1].record.step
        commit = Commit(
            version=way[-1].version.version,
            sha256=way[-1].version.sha256,
            anchor=way[0].use_anchor,
            changed=done.changed,
            payload_bytes=payload_bytes(way),
            stage_s=done.stage_s,
            pause_s=pause_s,
            scatter_s=done.scatter_s,
            reload_s=done.reload_s,
            lag_s=self._course.lag_s(way),
            tokens_during_sync=tokens,
            running_requests=running,
            served_at=time.time(),
        )
        self.commits.append(commit)
        self._metrics.committed(commit, any(stored.is_fold for stored in way))
        logger.info(
            "deltasync serves version=%(version)d digest=%(sha256).12s changed=%(changed)d stage_s=%(stage_s).3f "
            "pause_s=%(pause_s).4f scatter_s=%(scatter_s).4f reload_s=%(reload_s).3f lag_s=%(lag_s)s",
            msgspec.structs.asdict(commit) | {"lag_s": "-" if commit.lag_s is None else f"{commit.lag_s:.3f}"},
        )

    def _report(self, state: str, error: str | None) -> None:
        if error is not None and error != self._error:
            log = logger.info if state == "waiting" else logger.error
            log("deltasync: %s", error)
        self._state, self._error = state, error
