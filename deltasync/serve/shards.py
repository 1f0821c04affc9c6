"""A target for engines whose processes each hold a shard of the weights.

    stage -> (poll) -> pause, commit, announce, resume      in one call of all processes, or two

`ShardsTarget` puts the shards together: it calls a method of each, adds up what they found, and raises the
gravest error that one of them met. An engine brings an `EngineClient`, which reaches its processes, and a `Shard` in
each of them (`deltasync.serve.shard`). The shards get the records that the follow loop has read, so all of
them take the same chain, and a small version costs one request. They stage while the engine computes; the
pause covers the commit only. If a commit leaves unknown bits, the engine is held until an audit identifies
them or full weights replace them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from deltasync import limits
from deltasync.channel.documents import VersionId, sha256_hex
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.config import ReplicaSettings
from deltasync.errors import (
    ApplyError,
    CommitError,
    DeltaSyncError,
    ModelMismatchError,
    StageError,
    describe,
    get_logger,
    printable,
)
from deltasync.following.status import Commit
from deltasync.following.target import Identify
from deltasync.live import Prints, Union, assemble
from deltasync.opening import references
from deltasync.serve import proof
from deltasync.serve.engine import Answer, Failure, handed, is_safe, parse, succeeded, unique_name
from deltasync.serve.shard import Audit, Done, LoadProof

if TYPE_CHECKING:
    from deltasync.serve.metrics import Metrics

logger = get_logger(__name__)

_NOTHING = type(None)
# shortest and longest time between polls of long calls, which come between the engine's steps
_POLL_S = (0.002, 0.05)
# between calls of idle shards: with several, vLLM keeps a core of each busy for a second after a call
_SURE_S = 10.0


describe(LoadProof, Audit, Done)


class EngineClient:
    """Calls the processes of an engine. This one is for an engine that computes nothing while the follow loop
    steps.

    Attributes:
        held: Whether nothing may be computed, because the weights are uncertain.
        used: Whether another caller may have changed the weights. The target resets it.
        last_s: Seconds that the last pause for a commit took.

    Args:
        call: Calls `deltasync_open` or `deltasync_call` in every process: the first makes its `Shard`, the
            second has it take a call. Returns the answers in the order of ranks.
        announce: Labels tokens with the name of a version, and keeps caches apart.
    """

    held = used = False
    last_s = 0.0

    def __init__(
        self, call: Callable[..., list[Answer]], announce: Callable[[str], object] = lambda name: None
    ) -> None:
        self.call, self.announce = call, announce

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Return a context for a commit, which calls `exchange`. `held` after an error that is not safe
        (`is_safe`).
        """
        try:
            yield
            self.held = False
        except BaseException as error:
            self.held = self.held or not is_safe(error)
            raise

    def exchange(self, call: Sequence[Any], name: str | None) -> list[Answer]:
        """Make a call of all processes in a pause. The last one of a commit has the version's name, to
        announce.
        """
        answers = self.call("deltasync_call", *call)
        if name is not None and not any("error" in answer for answer in answers):
            self.announce(name)
        return answers

    def release(self) -> None:
        """Hold no more: it is known again which version the weights are."""
        self.held = False

    def cancel(self) -> None:
        """Give up the call that is under way."""

    def running_requests(self) -> int:
        """Return the number of requests in flight, 0 where that is not known."""
        return 0

    def generated_tokens(self) -> int:
        """Return the tokens generated since the engine started, 0 where that is not known."""
        return 0


class ShardsTarget:
    """The shards of all processes together, as a `Target`.

    Attributes:
        version: The version that the engine computes with. Changes only while it is paused.
        client: How they are reached.
        progressed_s: When the slowest shard's long call last came a step further, by `time.monotonic`.
        mirrored: The tensors that the engine does not keep as they are, and why.
        reloaded: Those of them whose layers it loads again in the pause of each version; the others have twins.
        ignored: The tensors that no process computes with: they are in no proof.
        ties: As `LiveMemory.ties`.
        draft: As `Engine.draft`.
        remark: As `Engine.remark`, after the last commit.
    """

    def __init__(
        self,
        client: EngineClient,
        reader: ChannelReader,
        settings: ReplicaSettings,
        metrics: Metrics,
        log: logging.Logger = logger,
    ) -> None:
        self.version: VersionId | None = None
        self.client, self.reader = client, reader
        self.progressed_s = 0.0
        self.mirrored: dict[str, str] = {}
        self.reloaded: set[str] = set()
        self.ignored: list[str] = []
        self.ties: dict[str, str] = {}
        self.draft: str | None = None
        self.remark: str | None = None
        self._settings, self._metrics, self._log = settings, metrics, log
        self._names: OrderedDict[int, str] = OrderedDict()  # the first digest that was served of each number
        self._regions: list[Any] = []  # the elements of each tensor that each shard holds
        self._union: Union | None = None
        self._found: Prints | None = None
        self._is_committing = self._is_asleep = self._is_closed = False
        self._tokens_before = 0  # tokens that were generated before staging began
        self._sure_s = -math.inf  # when the shards last knew their bits

    @property
    def held(self) -> bool:
        """As `EngineClient.held`."""
        return self.client.held

    # Calls of all shards

    def _replies(self, kind: Any, method: str, *args: Any) -> list[Any]:
        """Call a method of every `Shard`. Returns what each returns, of this kind, or its `Failure`.

        The engine computes meanwhile, if the call takes long.
        """
        (wait_s, longest_s), client = _POLL_S, self.client
        replies = client.call("deltasync_call", method, *args)
        self.progressed_s = time.monotonic()
        while any("working" in reply for reply in replies):
            if self._is_closed:
                raise StageError("This server stops following.")
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, longest_s)
            later = client.call("deltasync_call", "poll")
            idle_s = [reply["working"]["idle_s"] for reply in later if "working" in reply]
            self.progressed_s = max(self.progressed_s, time.monotonic() - max(idle_s, default=0.0))
            replies = [new if "working" in old else old for old, new in zip(replies, later, strict=True)]
        return [parse(reply, kind) for reply in replies]

    def _every(self, kind: Any, method: str, *args: Any) -> list[Any]:
        """Call a method of every `Shard`, and return what each returns. Raises as `succeeded`."""
        return succeeded(self._replies(kind, method, *args))

    # Opening

    def open(self, identify: Identify) -> None:
        """Record the load plans, prove them, and find the version (`Target.open`)."""
        channel, keys = self._settings.channel, self._settings.trusted_keys
        opened = self.client.call("deltasync_open", channel, None if keys is None else str(keys))
        succeeded([parse(each, _NOTHING) for each in opened])
        self._verify()
        self._prove()
        found = identify(self._total(self._every(Audit, "audit", self.ignored, self.ties)))
        self._every(_NOTHING, "identified", None if found is None else handed([found])[0])
        if found is not None:
            self._announce(found.version)
            self._log.info(
                "deltasync serves version=%d, which is what the engine has loaded", found.version.version
            )

    def _verify(self) -> None:
        """Compare all weights with the checkpoint through the load plans.

        Raises:
            ModelMismatchError: the shards do not hold every tensor in places that can be updated.
        """
        found, specs = self._every(LoadProof, "verify"), self.reader.specs
        mirrored = {name: why for each in found for name, why in each.mirrored.items()}
        nowhere = proof.check_coverage(specs, [each.regions for each in found], mirrored)
        ties = {name: other for each in found for name, other in each.ties.items() if name in nowhere}
        ignored = [name for name in nowhere if name not in ties]
        if ignored and not all(each.is_complete for each in found):
            which = f"{len(ignored)} tensors, such as {specs[ignored[0]]},"
            raise ModelMismatchError(
                f"{which} cannot be updated by this release: the engine's loader copies them nowhere."
            )
        proof.check_ignored(ignored, specs, set().union(*(each.absent for each in found)))
        self.mirrored, self.ignored, self.ties, self.draft = mirrored, ignored, ties, found[0].draft

    def _prove(self) -> None:
        """Make sure that all engines make again what they derive from weights, and say what is not served.

        Raises:
            ModelMismatchError: an engine does not, or the model has tensors that the channel lacks.
        """
        proven = self._every(tuple[list[str], list[str]], "prove")
        self.reloaded = {name for _, names in proven for name in names}
        missing = sorted({name for names, _ in proven for name in names})
        if missing:
            raise ModelMismatchError(
                f"{len(missing)} tensors of the model, such as {missing[0]}, are not in the channel, so they "
                "would stay as "
                "loaded: publish `state_dict()`, buffers included, or serve a checkpoint of the trainer's "
                "model."
            )
        self._warn(self.ignored, "are not served, and in no proof: the engine's loader ignores them")
        self._log.info(
            "deltasync load plan is proven: patched_in_place=%d twinned=%d reloaded=%d tied=%d ignored=%d",
            *(self.patched_count, len(self.twinned), len(self.reloaded), len(self.ties), len(self.ignored)),
        )
        if self.draft is not None:
            self._log.info("deltasync: %s", self.draft)
        for why, names in self.by_reason(self.reloaded).items():
            self._warn(
                names, f"are loaded again in the pause of each version, with their layers, because {why}"
            )

    @property
    def patched_count(self) -> int:
        """How many tensors commits write in place."""
        return len(self.reader.specs) - len(self.mirrored) - len(self.ignored) - len(self.ties)

    @property
    def twinned(self) -> set[str]:
        """The tensors whose layers have twins."""
        return self.mirrored.keys() - self.reloaded

    def by_reason(self, mirrored: Set[str]) -> dict[str, list[str]]:
        """Return mirrored tensors, by the reason why they are."""
        found: dict[str, list[str]] = {}
        for name in sorted(mirrored):
            found.setdefault(self.mirrored[name], []).append(name)
        return found

    def _warn(self, names: Sequence[str], what: str) -> None:
        if names:
            shown = ", ".join(map(printable, names[:5]))
            self._log.warning("deltasync: %d tensors (%s, ...) %s", len(names), shown, printable(what))

    def _total(self, audits: Sequence[Audit]) -> int:
        self._regions = [audit.regions for audit in audits]
        self._union = Union([*self.reader.specs], self._regions)
        return self._prints(audits).total

    def _prints(self, shards: Sequence[Audit] | Sequence[Done]) -> Prints:
        """Return the fingerprints of all tensors, from those that the shards say of their segments."""
        assert self._union is not None
        self._found = self._union.of(np.frombuffer(b"".join(each.parts for each in shards), np.uint64))
        return self._found

    @property
    def _fingerprints(self) -> dict[str, int]:
        """Each tensor's fingerprint over all shards, as of the last audit, or commit of several shards."""
        return {} if self._found is None else self._found.by_name(self.reader.specs)

    @property
    def is_open(self) -> bool:
        """Whether it is known what the shards hold."""
        return bool(self._regions)

    # Which version the weights are

    def is_settled(self, asked: bool) -> bool:
        """Whether the shards know which bits they hold: asked after what may change that, and else every
        `_SURE_S`.
        """
        if self.client.held:
            return False
        now_s, is_idle = time.monotonic(), not (asked or self.client.used or self._is_asleep)
        if is_idle and now_s - self._sure_s < _SURE_S:
            return True
        # until the shards have answered
        self._sure_s, self.client.used, self._is_asleep = -math.inf, False, True
        settled = all(self._every(bool, "settled"))
        self._is_asleep = False
        if settled:
            self._sure_s = now_s
        return settled

    def settle(self) -> None:
        """Audit the live bits, and announce which version they are."""
        total = self._total(self._every(Audit, "audit"))
        named = {*self._every(VersionId | None, "settle", total)}
        if len(named) > 1:
            raise ApplyError(f"The shards hold different versions: {', '.join(sorted(map(str, named)))}.")
        (identity,) = named
        if identity != self.version:
            self._announce(identity)
        if identity is not None:
            self.client.release()

    def _announce(self, version: VersionId | None) -> None:
        """Tell the engine which version is live, which labels tokens and keeps caches apart."""
        self.client.announce("unknown" if version is None else unique_name(self._names, version))
        self.version = version  # at last, because requests wait for it

    # A version

    def stage(self, chain: Sequence[StoredRecord]) -> Sequence[StoredRecord] | None:
        """Have all shards stage a chain (`Target.stage`). Returns None if one does not know its bits.

        A tensor of which a shard holds too little to decode it is handed to all shards that hold a part of
        it, once.

        Raises:
            ApplyError: a shard lacks a tensor that it was handed.
        """
        self._sure_s = -math.inf
        self._tokens_before = self.client.generated_tokens()
        completed, records = set[str](), handed(chain)
        while True:
            try:
                return chain if all(self._every(bool, "stage", records)) else None
            except DeltaSyncError as error:
                lacking = {*error.tensors}
                if not lacking:
                    reference = chain[0].record.reference
                    if reference is None or self.version is not None:
                        raise
                    unlike = references.unlike(self.reader, reference, self._fingerprints)
                    said = Failure.of(error)
                    raise msgspec.structs.replace(said, message=f"{said.message} {unlike}").error() from error
            if lacking & completed:
                raise ApplyError(f"A shard was handed {min(lacking & completed)}, and lacks it.")
            for name in sorted(lacking):
                self._complete(name)
            completed |= lacking
            size_mb = sum(self.reader.specs[name].nbytes for name in lacking) / 1e6
            self._log.info(
                "deltasync: each process keeps %d tensors whole on the host, %.1f MB, such as %s, to decode "
                "`context`",
                *(len(lacking), size_mb, min(lacking)),
            )

    def _complete(self, name: str) -> None:
        data = self._assembled(name).data.cast("B")
        for at in range(0, len(data), limits.HANDED_BYTES):
            self._every(_NOTHING, "complete", name, at, bytes(data[at : at + limits.HANDED_BYTES]))

    def commit(self, staged: Sequence[StoredRecord]) -> Commit:
        """Pause, commit on all shards or on none, compare with the published fingerprints, announce, resume.

        The commit has the longest times, and the sum of the changed elements.

        Raises:
            DeltaSyncError: the commit failed; `is_safe` says whether the old bits are live again.
        """
        version, client, running = staged[-1].version, self.client, self.client.running_requests()
        self._is_committing = True
        try:
            with self._metrics.attempt(lambda: client.last_s), client.committing():
                done = self._exchanged(unique_name(self._names, version))
                self.version = version
        finally:
            self._is_committing = False
        self._sure_s = time.monotonic()
        self.remark = next((each.remark for each in done if each.remark is not None), None)
        return Commit(
            version=version.version,
            sha256=version.sha256,
            anchor=staged[0].use_anchor,
            changed=sum(each.changed for each in done),
            stage_s=max(each.stage_s for each in done),
            pause_s=client.last_s,
            scatter_s=max(each.scatter_s for each in done),
            reload_s=max(each.reload_s for each in done),
            tokens_during_sync=client.generated_tokens() - self._tokens_before,
            running_requests=running,
        )

    def _exchanged(self, name: str) -> list[Done]:
        """Commit what is staged, in the pause, and announce it by this name."""
        alone = len(self._regions) == 1
        answers = self.client.exchange(("commit", alone), name if alone else None)
        replies = [parse(each, Done) for each in answers]
        if not alone and any(isinstance(reply, Failure) for reply in replies):
            _check_undone(self._replies(_NOTHING, "undo"))
        done = succeeded(replies)
        if not alone:
            value_T, same_T = self._prints(done)
            answers = self.client.exchange(("confirm", (value_T.tobytes(), same_T.tobytes())), name)
            confirmed = [parse(each, _NOTHING) for each in answers]
            if None in confirmed:
                _check_undone(confirmed)
            succeeded(confirmed)
        return done

    def digest(self) -> dict[str, str]:
        """Return the sha256 of every tensor that is computed with, in live memory, put together from all
        shards; of those that are `mirrored`, in the mirror.

        Raises:
            ApplyError: it is not known what the shards hold, or two hold different copies of the same
                elements.
        """
        if not self.is_open:
            raise ApplyError(
                "The server's weights were not compared with the channel's, so they have no digest."
            )
        return {
            name: sha256_hex(self._assembled(name).data)
            for name in self.reader.specs
            if name not in self.ignored
        }

    def made(self) -> list[dict[str, str]]:
        """Return, for each shard, the sha256 of what the engine has made of published bits, in live
        memory, by its name in the model.
        """
        return self._every(dict[str, str], "made")

    def _assembled(self, name: str) -> np.ndarray:
        return assemble(
            self.reader.specs[name],
            [held[name] for held in self._regions],
            self._every(list[bytes], "read", name),
        )

    def close(self) -> None:
        """Give up what is being staged; a commit goes on to its end."""
        if not self._is_committing:
            self._is_closed = True
            self.client.cancel()


def _check_undone(replies: Iterable[Any]) -> None:
    """Raise CommitError if a shard failed to undo a commit: shards may then hold different versions."""
    for reply in replies:
        if isinstance(reply, Failure):
            raise CommitError(f"A shard's weights are uncertain. {reply.error()}")
