"""The target's side of the workers: RPCs to all of them, and their shards put together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from deltasync.channel.documents import VersionId, sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import ApplyError, CommitError, ModelMismatchError, printable
from deltasync.live import assemble, combine, model_fingerprint, proof
from deltasync.tensors import Region
from vllm_plugin import logger
from vllm_plugin.engine import call_workers
from vllm_plugin.messages import Audit, CommitReply, Failure, Handed, Live, Reason, Work, gravest, parse

_T = TypeVar("_T")
_NOTHING = type(None)

_POLL_S = (0.002, 0.05)  # shortest and longest time between polls of background work, which are RPCs between engine steps
_HANDED_BYTES = 8 << 20  # of records in one call, which goes to each worker


class Workers:
    """The workers behind one engine client.

    Attributes:
        reasons: Why tensors take the fallback.
        progressed_s: When the slowest worker's background work last came a step further, by `time.monotonic`.
        fingerprints: Each tensor's fingerprint over all workers, as of the last audit, or commit of several workers.
    """

    def __init__(self, engine: Any, reader: ChannelReader) -> None:
        self._engine = engine
        self._reader = reader
        self._regions: list[dict[str, list[Region]]] = []  # which elements of each tensor each worker holds
        self.reasons: list[Reason] = []
        self.fingerprints: dict[str, int] = {}
        self.progressed_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether it is known what the workers hold."""
        return bool(self._regions)

    @property
    def reloaded_count(self) -> int:
        """How many tensors take the fallback."""
        return sum(reason.tensors for reason in self.reasons)

    async def open(self, channel: str, trusted_keys: str | None) -> int:
        """Learn what the workers hold, and prove it. Returns the model's fingerprint.

        Raises:
            ModelMismatchError: the workers do not hold every tensor in places that can be updated.
        """
        answers = await call_workers(self._engine, "deltasync_open", (channel, trusted_keys))
        _succeeded([parse(answer, _NOTHING) for answer in answers])
        found = await self._audits("verify")
        reloaded = {name: why for audit in found for name, why in audit.reloaded.items()}
        regions, specs = [audit.regions for audit in found], self._reader.specs
        ignored = await asyncio.to_thread(proof.check_coverage, specs, regions, reloaded)
        if ignored and not all(audit.complete for audit in found):
            which = f"{len(ignored)} tensors, such as {specs[ignored[0]]},"
            raise ModelMismatchError(f"{which} cannot be updated by this release: vLLM's loader copies them nowhere.")
        missing = sorted(set().union(*await self._call(list[str], "prove")))
        audits = await self._audits("audit", ignored)
        self._regions = [audit.regions for audit in audits]
        _warn(ignored, "are not served: vLLM's loader ignores them")
        _warn(missing, "stay as vLLM loaded them: the channel has no such tensors. Publish `state_dict()`, buffers included")
        names: dict[str, list[str]] = {}
        for name, why in reloaded.items():
            names.setdefault(why, []).append(name)
        self.reasons = [Reason(printable(why), len(of), printable(of[0])) for why, of in names.items()]
        patched = len(specs) - self.reloaded_count - len(ignored)
        logger.info("deltasync load plan is proven: patched_in_place=%d reloaded=%d", patched, self.reloaded_count)
        for why, of in names.items():
            _warn(of, f"take the fallback, because {why}: a commit has vLLM load their layers again, which takes longer")
        return self._fingerprint(audits)

    async def identified(self, stored: StoredRecord | None) -> None:
        """Tell the workers which version they hold, None for no version of the channel."""
        await self._call(_NOTHING, "identified", None if stored is None else handed([stored])[0])

    async def settled(self) -> bool:
        """Whether all workers know which version's bits they hold."""
        return all(await self._call(bool, "settled"))

    async def settle(self) -> VersionId | None:
        """Audit the workers. Returns the version that they hold, or None if the bits are not what they were taken for."""
        total = self._fingerprint(await self._audits("audit", []))
        named = {live.version for live in await self._call(Live, "settle", total)}
        if len(named) > 1:
            raise ApplyError(f"The workers hold different versions: {', '.join(sorted(map(str, named)))}.")
        (version,) = named
        return version

    async def _audits(self, method: str, *args: object) -> list[Audit]:
        """Have the workers `verify` where live memory lies, or `audit` it."""
        audits = []
        for work in await self._work(method, *args):
            if work.failure is not None:
                raise work.failure.error()
            if work.audit is None:
                raise ApplyError(f"A worker did not {method} its weights, it is {work.state}.")
            audits.append(work.audit)
        return audits

    def _fingerprint(self, audits: Sequence[Audit]) -> int:
        """Add up what an audit found, over all workers. Returns the model's fingerprint."""
        self.fingerprints = combine(self._regions, [audit.parts for audit in audits])
        return model_fingerprint(self.fingerprints)

    async def stage(self, way: Sequence[StoredRecord]) -> list[Work]:
        """Have all workers stage a way while tokens are generated. Returns what each ended with.

        A tensor of which a worker holds too little to decode it is handed to all workers that hold a part of it, once.

        Raises:
            ApplyError: a worker lacks a tensor that it was handed.
        """
        completed: set[str] = set()
        while True:
            replies = await self._work("stage", handed(way))
            lacking = {name for reply in replies for name in reply.lacking}
            if not lacking:
                return replies
            if lacking & completed:
                raise ApplyError(f"A worker was handed {min(lacking & completed)}, and lacks it.")
            for name in sorted(lacking):
                await self._complete(name)
            completed |= lacking
            size_mb = sum(self._reader.specs[name].nbytes for name in lacking) / 1e6
            logger.info(
                "deltasync: each worker keeps %d tensors whole on the host, %.1f MB, such as %s, to decode `context`",
                *(len(lacking), size_mb, min(lacking)),
            )

    async def _complete(self, name: str) -> None:
        data = (await self._assembled(name)).data.cast("B")
        for at in range(0, len(data), _HANDED_BYTES):
            await self._call(_NOTHING, "complete", name, at, bytes(data[at : at + _HANDED_BYTES]))

    async def commit(self) -> CommitReply:
        """Commit what is staged, on all workers or on none. Call while generation is paused.

        Returns the longest times, and the sum of the changed elements.

        Raises:
            DeltaSyncError: the commit failed; `is_safe` tells whether the old bits are live again.
        """
        alone = len(self._regions) == 1
        replies = await self._replies(CommitReply, "commit", alone)
        if not alone and any(isinstance(reply, Failure) for reply in replies):
            _check_undone(await self._replies(_NOTHING, "undo"))
        done = _succeeded(replies)
        if not alone:
            changed = combine(self._regions, [each.parts for each in done])
            fingerprints = self.fingerprints | changed
            confirmed = await self._replies(_NOTHING, "confirm", changed, model_fingerprint(fingerprints))
            if None in confirmed:
                _check_undone(confirmed)
            _succeeded(confirmed)
            self.fingerprints = fingerprints
        return CommitReply(
            changed=sum(each.changed for each in done),
            stage_s=max(each.stage_s for each in done),
            scatter_s=max(each.scatter_s for each in done),
            reload_s=max(each.reload_s for each in done),
        )

    async def digest(self) -> dict[str, str]:
        """Return the sha256 of every tensor in live memory, put together from all workers' shards.

        Raises:
            ApplyError: two workers hold different copies of the same elements.
        """
        return {name: sha256_hex((await self._assembled(name)).data) for name in self._reader.specs}

    async def _assembled(self, name: str) -> np.ndarray:
        shards = await self._call(list[bytes], "read", name)
        return assemble(self._reader.specs[name], [held[name] for held in self._regions], shards)

    async def _replies(self, kind: type[_T], method: str, *args: object) -> list[_T | Failure]:
        """Call a method of every `WorkerReplica`. Returns the replies in the order of their ranks."""
        answers = await call_workers(self._engine, "deltasync_call", (method, *args))
        return [parse(answer, kind) for answer in answers]

    async def _call(self, kind: type[_T], method: str, *args: object) -> list[_T]:
        return _succeeded(await self._replies(kind, method, *args))

    async def _work(self, method: str, *args: object) -> list[Work]:
        """Have all workers do background work while tokens are generated. Returns what each ended with."""
        wait_s, longest_s = _POLL_S
        replies = await self._call(Work, method, *args)
        self.progressed_s = time.monotonic()
        while any(reply.state == "working" for reply in replies):
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, longest_s)
            later = await self._call(Work, "poll")
            idle_s = [reply.idle_s for reply in later if reply.state == "working"]
            self.progressed_s = max(self.progressed_s, time.monotonic() - max(idle_s, default=0.0))
            replies = [new if old.state == "working" else old for old, new in zip(replies, later, strict=True)]
        return replies


def _warn(names: Sequence[str], what: str) -> None:
    if names:
        logger.warning(
            "deltasync: %d tensors (%s, ...) %s", len(names), ", ".join(map(printable, names[:5])), printable(what)
        )


def _succeeded(replies: Sequence[_T | Failure]) -> list[_T]:
    """Return the replies, or raise the gravest failure among them."""
    failures = [reply for reply in replies if isinstance(reply, Failure)]
    if failures:
        raise gravest(failures)
    return [reply for reply in replies if not isinstance(reply, Failure)]


def _check_undone(replies: Sequence[Failure | None]) -> None:
    """Raise CommitError if a worker failed to undo a commit: workers may then hold different versions."""
    for reply in replies:
        if reply is not None:
            raise CommitError(f"A worker's weights are uncertain. {reply.error()}")


def handed(way: Sequence[StoredRecord]) -> list[Handed]:
    """Return records for the workers, with their bytes up to a limit: workers read the others by themselves."""
    found: list[Handed] = []
    left = _HANDED_BYTES
    for stored in way:
        data = stored.data if stored.size <= left else None
        left -= 0 if data is None else stored.size
        found.append((stored.key, stored.sha256, data))
    return found
