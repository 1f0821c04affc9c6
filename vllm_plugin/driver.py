"""The driver: one task in vLLM's API server that follows the channel and moves the workers along.

    way -> stage -> (poll) -> pause_generation(keep) -> commit -> [confirm] -> update_weight_version -> resume_generation

The driver alone polls, looks and plans (`deltasync.follow.Course`), and hands the workers what it has read, so that all of
them take the same way, and a small version costs one request. Staging happens in the workers while tokens are generated; the
pause covers the commit only. If staging or the commit fails, the version before stays served, and the next look tries again,
by another way if the way was at fault. If a commit fails so that nobody knows the bits, generation stays paused until an
audit or full weights tell. If another client has paused generation, it stays paused; while vLLM sleeps, nothing is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from deltasync.channel import heartbeat, payloads
from deltasync.channel.documents import Version, sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import Stored
from deltasync.config import ReplicaSettings
from deltasync.errors import (
    ApplyError,
    DeltaSyncError,
    FingerprintMismatchError,
    NotPublishedError,
    SleepingError,
)
from deltasync.follow import Course, Poll
from deltasync.live import Region, combine, model_fingerprint
from deltasync.printable import printable
from deltasync.stores import ObjectInfo, open_store
from deltasync.stores.cache import CachedStore, behind_cache
from vllm_plugin import load_plan
from vllm_plugin.beats import Beats
from vllm_plugin.looks import Looks
from vllm_plugin.metrics import Commit, Metrics, error_class, generated_tokens, running_requests
from vllm_plugin.pauses import Pauses
from vllm_plugin.workers import Workers, assemble, by_reason, handed, log_plan, regions_of, told

logger = logging.getLogger(f"vllm.{__name__}")  # under vLLM's own logger, whose handlers and level it shares

HISTORY = 4096
"""Commits that are remembered."""

DETOURS = 8
"""Failed looks after which whoever waits for a version is told, because the next one may take another way."""

STALE_S, STALE_POLLS = 60.0, 20
"""A server whose last good look was longer ago than so many seconds, and than so many longest waits, is stale."""

_LOOK_S = 60.0  # that a look is waited for

_UNDONE = ("FingerprintMismatchError", "StageError", "SleepingError")
"""Errors of a commit that say that it did not begin, or that the old bits are back."""


class Driver:
    """Follows one channel for one server.

    Args:
        engine: vLLM's engine client.
        settings: With a channel.
        metrics: Told what happens.

    Attributes:
        identity: The version that tokens are made with; changes only while generation is paused. None before the first.
    """

    def __init__(self, engine: Any, settings: ReplicaSettings, metrics: Metrics) -> None:
        assert settings.channel is not None
        self._engine = engine
        self._workers = Workers(engine)
        self.pauses = Pauses(engine)
        self._settings = settings
        self._metrics = metrics
        self._channel = settings.channel
        store = behind_cache(open_store(settings.channel), settings.cache_dir, settings.cache_bytes)
        self._reader = ChannelReader(store, settings.trusted_keys)
        self._course = Course(self._reader, settings.max_age_s, prefetch=isinstance(store, CachedStore))  # for the workers
        self._state = "waiting"
        self._error: str | None = "Waiting for the first look at the channel."
        self.identity: Version | None = None
        self._names: OrderedDict[int, str] = OrderedDict()  # the digest that was served first, of each number
        self._opened = False
        self._looks = Looks("deltasync-look")
        self._beats = Beats(store, settings.heartbeat_interval_s)
        self._busy = asyncio.Lock()
        self._wake = asyncio.Event()  # look now
        self._looked = asyncio.Event()  # the look that goes on or comes next has ended; then there is a new one
        self._begun = 0  # looks
        self._caught_up = -1  # the last look that found nothing to take
        self._poll: Poll | None = None
        self._known: ObjectInfo | None = None  # what the store told of a new record
        self._asked = False  # somebody waits for a version
        self._anew = False  # what the course thinks was done was not
        self._accused: tuple[Sequence[Stored], str | None, object] | None = (
            None  # a way that failed, at which record, and why
        )
        # Of each worker, which elements of each tensor it holds; of each tensor, its fingerprint over all workers.
        self._regions: list[dict[str, list[Region]]] = []
        self._reloaded: dict[str, str] = {}  # tensors that take the fallback, and why
        self._fingerprints: dict[str, int] = {}
        self._audited_s = 0.0
        self._served_s = 0.0
        self.commits: deque[Commit] = deque(maxlen=HISTORY)

    @property
    def version(self) -> int | None:
        """Its number."""
        return None if self.identity is None else self.identity.version

    @property
    def _have(self) -> Version | None:
        """Where the next way begins."""
        return self.identity

    @property
    def caught_up(self) -> bool:
        """Whether the last look found nothing to take."""
        return self._caught_up == self._begun

    @property
    def _newest(self) -> int | None:
        return None if self._course.newest is None else self._course.newest.version

    @property
    def _last_look_s_ago(self) -> float | None:
        """Since the store last answered a look."""
        return None if self._course.looked_s is None else time.monotonic() - self._course.looked_s

    @property
    def _stale(self) -> str | None:
        """In one sentence, that nobody knows whether what is served is new; None if it is known."""
        limit_s = max(STALE_S, STALE_POLLS * self._settings.poll_interval_s)
        since_s = min(self._last_look_s_ago or 0.0, time.monotonic() - self._served_s)
        if self.identity is None or self._state not in ("serving", "failed") or since_s <= limit_s:
            return None
        return f"The last good look at the channel was {since_s:.0f} s ago. {self._error or ''}".rstrip()

    @property
    def not_ready(self) -> str | None:
        """Why this server should not get requests, in one sentence; None if it serves a version that is new enough."""
        served, newest = self.version, self._newest
        if served is None or newest is None:
            return f"This server serves no version of {self._reader.store.url} yet. {self._error or ''}".rstrip()
        if self._state == "sleeping" or self.pauses.held:
            return f"This server does not generate now. {self._error or ''}".rstrip()
        if newest - served > self._settings.ready_behind:
            return f"This server serves version {served}, {newest - served} behind version {newest}."
        return self._stale

    def status(self, commit_count: int = HISTORY) -> dict[str, Any]:
        """What `GET /deltasync/status` returns, with the last commits only."""
        recent = list(self.commits)[-commit_count:] if commit_count else []
        stale = self._stale
        return {
            "replica_id": self._settings.replica_id,
            "channel": self._reader.store.url,
            "run_id": self._reader.run_id,
            "state": self._state if stale is None else "stale",
            **self._serves(),
            "last_look_s_ago": self._last_look_s_ago,
            "error": self._error if stale is None else stale,
            "kv_cache": self._settings.kv_cache,
            "trusted_keys": None if self._reader.trusted is None else self._reader.trusted.names,
            "patched_tensors": len(self._reader.specs) - len(self._reloaded) if self._opened else None,
            "reloaded_tensors": len(self._reloaded) if self._opened else None,
            "reloaded": by_reason(self._reloaded),
            "commits": [dataclasses.asdict(commit) for commit in recent],
        }

    def _serves(self) -> dict[str, Any]:
        """Identity of what is served, and the newest version that is known."""
        identity = self.identity
        return {
            "version": self.version,
            "epoch": None if identity is None else identity.epoch,
            "sha256": None if identity is None else identity.sha256,
            "newest_version": self._newest,
        }

    async def reach(self, version: int | None) -> int:
        """Look at once, and wait until a version or a later one is served.

        Args:
            version: None for the newest that is published now, or the first if none is.

        Returns:
            The version served.
        """
        begun = self._begun
        self._asked = True
        self._wake.set()
        while True:
            served = self.version
            if served is not None and (self._caught_up > begun if version is None else served >= version):
                return served
            await self._looked.wait()

    async def digest(self) -> dict[str, Any]:
        """sha256 of every tensor in live memory, all workers' shards together, with the version they are of.

        Raises:
            ApplyError: two workers hold different copies of the same elements.
        """
        async with self._busy:
            version, sha256 = self.version, {}
            if len(self._regions) == 1:
                (reply,) = await self._workers.call("digest")
                sha256 = reply["sha256"]
            else:
                for name, spec in self._reader.specs.items():
                    shards = [reply["bits"] for reply in await self._workers.call("read", name)]
                    regions = [held[name] for held in self._regions]
                    sha256[name] = sha256_hex(assemble(spec, regions, shards).data)
        return {"version": version, "sha256": sha256}

    async def run(self) -> None:
        """Follow until cancelled."""
        logger.info("deltasync follows %s as %s", self._reader.store.url, self._settings.replica_id)
        loop = asyncio.get_running_loop()

        def on_change(info: ObjectInfo | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is about to end
                loop.call_soon_threadsafe(self._changed, info)

        with Poll(self._reader.store, self._settings.poll_interval_s, on_change) as self._poll:
            while True:
                self._wake.clear()
                before = self.identity
                await self.look()
                self._beats.tell(self.status(0))
                moved, settled = self.identity != before, self._state in ("serving", "waiting")
                # Not `wait_for`, which may keep a cancellation to itself.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll.delay_s(moved, settled)):
                        await self._wake.wait()

    def _changed(self, info: ObjectInfo | None) -> None:
        self._known = info
        self._wake.set()

    async def stop(self) -> None:
        """Tell the channel that this server has ended in order. Call when `run` has ended."""
        self._state, self._error = heartbeat.STOPPED, None
        await self._beats.stop(self.status(0))

    async def look(self, number: int | None = None) -> None:
        """Go one step towards a version, the newest by default, and report what came of it."""
        self._begun += 1
        try:
            if await self._follow_once(number):
                self._caught_up = self._begun
        except NotPublishedError as error:
            self._report("waiting", f"Waiting for the first version: {error}")
        except SleepingError as error:
            self._report("sleeping", str(error))
        except DeltaSyncError as error:
            self._metrics.failed(error)
            self._report("failed", f"{type(error).__name__}: {error}")
        except Exception as error:  # the server goes on with the weights it has, and says why
            self._metrics.failed(error)
            self._report("failed", printable(f"Unexpected {type(error).__name__}: {error}"))
            logger.exception("deltasync failed unexpectedly")
        self._metrics.looked(self.version, self._newest, self._last_look_s_ago)
        self._looked.set()
        self._looked = asyncio.Event()

    async def _follow_once(self, number: int | None) -> bool:
        """Take what there is to take; whether there was nothing."""
        async with self._busy:
            if not self._opened:
                await self._open()
            elif self.pauses.held or not await self._settled():
                await self._settle()
        way = await self._next(number)
        async with self._busy:
            if not way:
                await self._audit_if_due()
                self._report("serving", self._course.problem)
                return True
            tokens_before = generated_tokens()
            if await self._stage(way):
                await self._commit(way, tokens_before)
        return False

    async def _next(self, number: int | None) -> list[Stored]:
        """Ask the course where to go. What failed before is told to it first, if the bits in memory were not to blame."""
        if self._accused is not None:
            self._course.refused(*self._accused)
            self._accused = None
        course, have, known, told = self._course, self._have, self._known, self._poll is not None and self._poll.told
        again = self._asked and (course.stuck or course.problem is not None)
        if again:
            course.forgive()
        now = self._anew or again
        self._known, self._asked, self._anew = None, False, False
        way: list[Stored] = await self._ask(
            (have, number), lambda: course.next(have, number=number, known=known, now=now, told=told)
        )
        return way

    async def _ask(self, asked: object, action: Any) -> Any:
        return await self._looks.take(asked, action, _LOOK_S)

    async def _open(self) -> None:
        """Learn what the workers hold, prove it, and find out which version they serve."""
        await self._ask("published", self._check_published)
        keys = self._settings.trusted_keys
        await self._workers.rpc("deltasync_open", self._channel, None if keys is None else str(keys))
        total = await self._audit(first=True)
        found: Stored | None = await self._ask(("identify", total), lambda: self._course.identify(total))
        await self._workers.call("identified", None if found is None else handed([found])[0])
        if found is not None:
            await self._announce(found.version)
            logger.info("deltasync serves version=%d, which the loaded weights already were", found.version.version)
        self._opened = True

    def _check_published(self) -> None:
        self._reader.channel()
        if self._reader.head() is None and self._reader.newest() is None:
            raise NotPublishedError(f"{self._reader.store.url} holds no version yet.")

    async def _settled(self) -> bool:
        """Whether all workers know what the bits in their memory are."""
        return all(reply["settled"] for reply in await self._workers.call("settled"))

    async def _audit_if_due(self) -> None:
        """Find out bits that changed by themselves, by a fault of the memory say.

        Raises:
            ApplyError: there are some. The next look loads full weights.
        """
        interval_s, before = self._settings.audit_interval_s, self.version
        if interval_s and time.monotonic() - self._audited_s >= interval_s:
            await self._settle()
            if self.identity is None:
                raise ApplyError(f"The weights in memory were not those of version {before} any more; loading full weights.")

    async def _settle(self) -> None:
        """Find out whether the live bits are those of the version that is taken for live, and tell the workers."""
        total = await self._audit(first=False)
        replies = await self._workers.call("settle", total)
        named = {None if reply["version"] is None else Version(*reply["version"]) for reply in replies}
        if len(named) > 1:
            raise ApplyError(f"The workers hold different versions: {', '.join(sorted(map(str, named)))}.")
        (identity,) = named
        if identity != self.identity:
            self._accused, self._anew = None, True
            await self._announce(identity)
        if identity is not None:
            await self.pauses.release()

    async def _audit(self, first: bool) -> int:
        """Read all live memory; the first time, prove where it lies. Returns the fingerprint of the model."""
        replies = await self._workers.work("audit", first)
        self._audited_s = time.monotonic()
        if first:
            self._regions = [regions_of(reply) for reply in replies]
            self._reloaded = {name: why for reply in replies for name, why in reply["reloaded"].items()}
            await asyncio.to_thread(load_plan.check_coverage, self._reader.specs, self._regions, self._reloaded)
            if self._reloaded:
                await self._workers.call("prove")
            log_plan(len(self._reader.specs), self._reloaded)
        parts = [{name: tuple(values) for name, values in reply["parts"].items()} for reply in replies]
        self._fingerprints = combine(self._regions, parts)
        return model_fingerprint(self._fingerprints)

    async def _announce(self, version: Version | None) -> None:
        """Tell vLLM which version the weights are, which labels tokens and keeps the prefix cache apart."""
        await self._engine.update_weight_version("unknown" if version is None else self._name(version))
        self.identity, self._served_s = version, time.monotonic()

    def _name(self, version: Version) -> str:
        """Its number; behind that, if another version of that number was served before, the begin of its digest."""
        first = self._names.setdefault(version.version, version.sha256)
        if len(self._names) > HISTORY:
            self._names.popitem(last=False)
        return str(version.version) if first == version.sha256 else f"{version.version}-{version.sha256[:12]}"

    async def _stage(self, way: Sequence[Stored]) -> bool:
        """Have the workers stage a way; False if one of them does not know what its bits are, which the next look settles.

        Raises:
            ApplyError: a worker failed; the next look tries again, by another way if the way is at fault.
        """
        self._state = "staging"
        replies = await self._workers.work("stage", handed(way))
        failed = [reply for reply in replies if reply["state"] == "failed"]
        if not failed:
            return all(reply["state"] == "staged" for reply in replies)
        self._anew = True
        keys = [reply["failed"] for reply in failed if reply["failed"] is not None]
        if keys:
            self._accused = way, keys[0], failed[0]["error"]
        error, reference = failed[0]["error"], way[0].record.reference
        if reference is not None and self.identity is None:
            error = f"{error} {payloads.unlike(self._reader, reference, self._fingerprints)}"
        raise ApplyError(error)

    async def _commit(self, way: Sequence[Stored], tokens_before: int) -> None:
        """Pause, commit, hold the bits to the published fingerprints, announce, resume."""
        self._state = "committing"
        running = running_requests()
        try:
            async with self.pauses.paused(self._settings.kv_cache == "recompute", is_safe):
                reply = await self._commit_paused()
                await self._announce(way[-1].version)
        except ApplyError as error:
            self._anew = True
            if error_class(error) == FingerprintMismatchError.__name__:
                self._accused = way, None, error
            self._metrics.rolled_back(error)
            raise
        finally:
            pause_s = self.pauses.last_s
            self._metrics.paused(pause_s)
        self._committed(
            way,
            changed=reply["changed"],
            stage_s=reply["stage_s"],
            pause_s=pause_s,
            scatter_s=reply["scatter_s"],
            reload_s=reply["reload_s"],
            tokens_during_sync=generated_tokens() - tokens_before,
            running_requests=running,
        )
        self._report("serving", None)

    def _committed(self, way: Sequence[Stored], **numbers: Any) -> None:
        """Note a commit, in the status, the metrics and the log."""
        served_at, version = time.time(), way[-1].version
        commit = Commit(
            version=version.version,
            sha256=version.sha256,
            anchor=way[0].use_anchor,
            payload_bytes=sum(stored.payload_bytes for stored in way),
            lag_s=served_at - way[-1].record.created_s,
            served_at=served_at,
            **numbers,
        )
        self.commits.append(commit)
        fold = any(stored.is_fold for stored in way)
        self._metrics.committed(commit, "anchor" if commit.anchor else "fold" if fold else "delta")
        logger.info(
            "deltasync serves version=%d digest=%.12s changed=%d stage_s=%.3f pause_s=%.4f scatter_s=%.4f reload_s=%.3f "
            "lag_s=%.3f",
            commit.version,
            commit.sha256,
            commit.changed,
            commit.stage_s,
            commit.pause_s,
            commit.scatter_s,
            commit.reload_s,
            commit.lag_s,
        )

    async def _commit_paused(self) -> dict[str, Any]:
        """Commit on all workers, or on none; returns the longest times, and the numbers of all of them together."""
        alone = len(self._regions) == 1
        replies = await self._workers.call("commit", alone, check=False)
        errors = [reply["error"] for reply in replies if "error" in reply]
        if errors:
            if not alone:
                await self._workers.call("undo")
            raise told(errors[0])
        merged = replies[0] | {key: max(reply[key] for reply in replies) for key in ("stage_s", "scatter_s", "reload_s")}
        if alone:
            return merged
        parts = [{name: tuple(values) for name, values in reply["parts"].items()} for reply in replies]
        changed = combine(self._regions, parts)
        fingerprints = self._fingerprints | changed
        await self._workers.call("confirm", changed, model_fingerprint(fingerprints))
        self._fingerprints = fingerprints
        return merged | {"changed": sum(reply["changed"] for reply in replies)}

    def _report(self, state: str, error: str | None) -> None:
        if error is not None and error != self._error:
            logger.log(logging.INFO if state == "waiting" else logging.ERROR, "deltasync: %s", error)
        self._state, self._error = state, error


def is_safe(error: BaseException) -> bool:
    """Whether live weights are those of the version before, although a commit ended with this error."""
    return isinstance(error, ApplyError) and error_class(error) in _UNDONE
