"""Start a publisher: check its arguments, read what its channel holds, and compare the first stream with
that.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deltasync.channel import anchors, documents, payloads, plan, signing
from deltasync.channel.documents import Channel, Reference, VersionId
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.codec.base import Bits, RangeBits
from deltasync.config import PublisherOptions, PublisherSettings, Retention
from deltasync.errors import (
    ApplyError,
    ChainError,
    ConfigError,
    CorruptDataError,
    FormatError,
)
from deltasync.live import LiveMemory, Segment, model_fingerprint
from deltasync.opening import adapter_base, checkpoint, references
from deltasync.opening.acquire import open_channel
from deltasync.opening.checkpoint import Checkpoint
from deltasync.opening.owner import check_resume, owner_of
from deltasync.opening.ranges import Piece
from deltasync.publish.agreement import Alone, StreamReader, attempt
from deltasync.publish.detect import Difference, copied
from deltasync.publish.log import Log
from deltasync.publish.maintenance import Maintenance
from deltasync.publish.ranges import Range, Stream, TensorRange
from deltasync.publish.shadow import Shadow
from deltasync.stores import Store, open_store
from deltasync.stores.base import check_key
from deltasync.stores.retries import READS, RetryStore, retried
from deltasync.tensors import Delta, Sparse, TensorSpec, fingerprint
from deltasync.tensors.bits import bits_of, signed_view

logger = logging.getLogger(__name__)

_DETOURS = 8  # objects that cannot be read, before a version is given up

ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's file. It has the scaling of an adapter, which is in none of its weights."""


def check_arguments(
    channel: str | os.PathLike[str] | Store,
    model_files: str | Path | Mapping[str, bytes] | None,
    retention: Retention | None,
    resume: object,
    options: PublisherOptions,
) -> tuple[PublisherSettings, Retention, Store, Mapping[str, bytes]]:
    """Return settings, retention, store and model files of a publisher's arguments.

    Raises:
        ConfigError: one is wrong.
    """
    settings = PublisherSettings.from_env(**options)
    retention = Retention.from_env() if retention is None else retention
    if not isinstance(retention, Retention):
        raise ConfigError(f"retention must be a Retention, not {retention!r}.")
    check_resume(resume)
    store = RetryStore(open_store(channel), settings.retries, settings.retry_delay_s)
    if isinstance(model_files, str | Path):
        model_files = anchors.read_model_files(Path(model_files))
    files = dict(model_files or {})
    for name in files:
        check_key(name)
    return settings, retention, store, files


def warn_of_growth(store: Store, retention: Retention) -> None:
    """Warn that nothing will be deleted, as no retention is set. A channel in memory ends with its process."""
    if retention.keep_last is None and not store.url.startswith("memory:"):
        logger.warning(
            "Nothing is ever deleted from %s: it keeps all versions. DELTASYNC_KEEP_LAST=1000, say, bounds "
            "it; "
            "docs/operations/cost.md has sizes.",
            store.url,
        )


class ChannelState(NamedTuple):
    """A channel as the first rank found it, for all ranks."""

    options: dict[str, str | int | float | None]  # the settings
    channel: Channel | None
    run_id: str
    number: int  # of the newest version, readable or not; 0 if there is none
    chain: Sequence[StoredRecord]  # from nothing to it, without bytes; empty if nothing can build on it
    trusted: list[str] | None  # keys of writers, None if everything is taken

    @property
    def settings(self) -> PublisherSettings:
        """The first rank's settings."""
        return PublisherSettings(**self.options)  # type: ignore[arg-type]

    @property
    def end(self) -> VersionId:
        """The newest version, which the next one builds on."""
        return self.chain[-1].version


def open_first(
    store: Store,
    settings: PublisherSettings,
    resume: bool,
    files: Mapping[str, bytes],
    owner: str | os.PathLike[str] | None = None,
) -> tuple[ChannelState, Log]:
    """Open a channel to write to it, and find the chain to its newest version. Raises as `open_channel` and
    `owner_of`.

    The next version has full weights if `files`, beside them, change what an adapter's weights mean.
    """
    signer = signing.signer_of(settings)
    reader = ChannelReader(store, None if signer is None else signer.trusted)
    log = open_channel(reader, settings, resume, signer, owner=owner_of(owner))
    chain, tip = list[StoredRecord](), log.tip
    if tip is not None:
        try:
            retried(lambda: reader.record(tip), READS - 1, passing=(CorruptDataError,))
            chain = [dataclasses.replace(stored, data=None) for stored in plan.find_chain(reader, None, tip)]
            if _has_other_adapter(chain[0], files):
                logger.info(
                    "The adapter of version %s has another config or base. The next version has full "
                    "weights.",
                    tip,
                )
                chain = []
        except (CorruptDataError, ChainError) as error:
            logger.warning(
                "Version %s cannot be read: %s The next version has full weights. See `deltasync check`, then "
                "`deltasync repair`.",
                *(tip, error),
            )
    number = 0 if tip is None else tip.version
    options = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(settings).items()
    }
    if log.channel is not None:
        options["dtype"] = log.channel.dtype
    return ChannelState(
        options, log.channel, log.run_id, number, chain, None if signer is None else signer.trusted.names
    ), log


def _has_other_adapter(stored: StoredRecord, files: Mapping[str, bytes]) -> bool:
    """Whether these files change the config or the base of an adapter, which replicas learn with full weights
    only.
    """
    anchor = stored.record.anchor
    known = (
        {}
        if anchor is None
        else {file.key.removeprefix(f"{anchor.directory}/"): file.sha256 for file in anchor.model_files}
    )
    changed = {name for name, data in files.items() if known.get(name) != documents.sha256_hex(data)}
    return ADAPTER_CONFIG in known and not changed.isdisjoint((ADAPTER_CONFIG, adapter_base.FILE))


class Start:
    """Compares the first stream with the version that is resumed, or with a checkpoint that everybody has.

    Only that stream tells which ranges each rank of a sharded trainer holds, and so has to read.

    Args:
        ranks: The agreement of the ranks, or of one process.
        source: Reads the streams.
        reader: The channel's.
        state: The state of the channel.
        initial: The checkpoint for a new channel. Every rank loads it; the first one decides which commit it
            is.
        maintenance: Takes the deltas that lead to the version that is resumed.

    Attributes:
        channel: The channel's description, once a stream was compared.
        source: Reads the streams.
        begins_again: Whether a first version that was lost may be a reference again.
        shadow: The bits of this rank's ranges: those of the version that is resumed, or of the reference, or
            of the stream.
        is_resumed: Whether they are those of the version that is resumed.
        reference: The reference to the checkpoint that the first version is, if it is one.

    Raises:
        ConfigError, CorruptDataError: a rank cannot load the checkpoint; then all raise.
    """

    def __init__(
        self,
        ranks: Alone,
        source: StreamReader,
        reader: ChannelReader,
        state: ChannelState,
        initial: str | Path | None,
        maintenance: Maintenance,
    ) -> None:
        self.channel, self.source = state.channel, source
        self.shadow: Shadow | None = None
        self.is_resumed = False
        self.reference: Reference | None = None
        self.initial: Checkpoint | None = None
        if initial is not None and not state.number:
            reference = ranks.first(lambda: checkpoint.find(initial), Reference)
            self.initial = ranks.all(lambda: checkpoint.load(reference))
        self._ranks, self._reader, self._state, self._maintenance = ranks, reader, state, maintenance
        self._resumes = bool(state.chain)
        self.begins_again = self.initial is not None and ranks.size == 1
        if self.channel is not None and ranks.size == 1:
            self.resumed(source.held[0])

    def compare(self, named_tensors: Stream, *, may_refer: bool) -> Difference:
        """Compare the first stream, and set the attributes. With `may_refer` its version may be a reference.

        Returns the difference from the resumed version, or from the reference.

        Raises:
            ModelMismatchError, ConfigError: at all ranks; nothing was set.
        """
        ranks, source, place = self._ranks, self.source, self._state.settings.shadow
        self.is_resumed, self.reference = False, None
        parts = source.first(named_tensors)
        specs, ranges = source.specs, source.held[ranks.rank]
        if self.channel is None and ranks.rank == 0 and all(name.startswith("module.") for name in specs):
            logger.warning(
                "All names begin with `module.`, as named_parameters() of DDP's wrapper gives them; a "
                "checkpoint's names do "
                "not. Publish the module itself, publisher.publish(model)."
            )
        self.channel = self.channel or _new_channel(specs, self._state.settings.dtype)
        shadow = self.resumed(ranges)
        if shadow is None and self.initial is not None and may_refer:
            self.reference, shadow = _referred(ranks, self.initial, specs, parts, place)
        if shadow is None:
            self.shadow = ranks.all(
                lambda: Shadow.of(specs, parts, place, source.devices, keep=source.are_copies)
            )
            return Difference()
        self.shadow = known = shadow
        known.settle(source.devices)
        found = ranks.all(lambda: known.compare([part.held for part in parts.values()], [*parts]))
        if self.reference is not None and found.pieces:
            differing = len({name for piece in found.pieces for name in piece.counts()})
            logger.warning("%d tensors are not as in %s; they follow as a delta.", differing, self.reference)
        return found

    def resumed(self, ranges: Mapping[str, Range]) -> Shadow | None:
        """Read these ranges of the version to resume, once; set `shadow` and `is_resumed`. Return the
        shadow, or None if there is no such version, or if it cannot be read.
        """
        if not self._resumes:
            return None
        self._resumes, state = False, self._state
        found, problem = attempt(lambda: self._read(ranges))
        damage = problem if isinstance(problem, FormatError | ChainError | ApplyError) else None
        added = 0 if found is None else found.fingerprints.total
        damaged, total = self._ranks.agree(None if damage else problem, [damage is not None, added]).tolist()
        if damaged or fingerprint.to_hex(total) != state.chain[-1].record.fingerprint:
            why = damage or "on another rank, or its bits do not have its fingerprint."
            logger.warning("Version %s cannot be read: %s The next version has full weights.", state.end, why)
            return None
        self.shadow, self.is_resumed = found, True
        return found

    def _read(self, ranges: Mapping[str, Range]) -> Shadow:
        """Read the newest version, around objects that cannot be read. The caller checks the fingerprint over
        all ranks.
        """
        chain, avoid = self._state.chain, dict[str, str]()
        while True:
            read: list[StoredRecord] = []
            try:
                note = self._maintenance.replay(self._reader.layout, ranges, chain[0].record.version)
                bits = replayed(self._reader, ranges, chain, read, note)
                return Shadow(self._reader.specs, ranges, bits, self._state.settings.shadow)
            except (FormatError, ChainError, ApplyError) as error:
                if not read or len(avoid) == _DETOURS:
                    raise
                logger.warning("Version %s is read in another way: %s", self._state.end, error)
                avoid[read[-1].key] = str(error)
            chain = plan.find_chain(self._reader, None, self._state.end, avoid)


def replayed(
    reader: ChannelReader,
    ranges: Mapping[str, Range],
    chain: Sequence[StoredRecord],
    read: list[StoredRecord],
    note: Callable[[Delta], None] | None = None,
) -> dict[str, np.ndarray]:
    """Return the bits of these ranges that a chain leads to.

    Appends each record to `read` before it is read. `note` is called with each delta, of these ranges only.

    Raises:
        StoreError, ChainError, FormatError, ApplyError: the last one cannot be read.
    """
    specs = reader.specs
    bits = _empty(specs, ranges)
    segments = {name: [Segment(signed_view(held), (1,), ranges[name][0])] for name, held in bits.items()}
    live = LiveMemory(specs, segments)
    is_whole = all(ranges[name] == (0, spec.element_count) for name, spec in specs.items())

    def old(name: str) -> Bits:
        if name not in bits:
            return live.gather(name)  # which refuses it
        return RangeBits(bits[name], ranges[name][0], specs[name].element_count)

    for stored in chain:
        read.append(stored)
        if stored.use_anchor:
            whole = ((name, 0, bits_N) for name, bits_N, _ in payloads.weights(reader, stored))
            _fill(bits, ranges, whole if is_whole else references.ranges_of_weights(reader, stored, ranges))
            live.audit()
        else:
            changed = payloads.delta(reader, stored, old, live.wanted)
            live.commit(live.stage(changed))
            if note is not None:
                note(changed.delta if is_whole else _inside(changed.delta, ranges))
        if is_whole and fingerprint.to_hex(model_fingerprint(live.fingerprints)) != stored.record.fingerprint:
            raise CorruptDataError(f"{stored.key} leads to other bits than it names.")
    return bits


def _inside(delta: Delta, ranges: Mapping[str, Range]) -> Delta:
    """Return the steps of elements that are held: a reader may decode others, too."""
    found = {}
    for width, steps in delta.steps.items():
        vector = delta.layout.vectors[width]
        start_T, stop_T = vector.first_T[:-1] + np.array([ranges[name] for name in vector.names], np.int64).T
        tensor_K = vector.tensor(steps.at_K)
        inside_K = (steps.at_K >= start_T[tensor_K]) & (steps.at_K < stop_T[tensor_K])
        if inside_K.any():
            found[width] = Sparse(steps.at_K[inside_K], steps.data_K[inside_K])
    return Delta(delta.layout, found)


def _new_channel(specs: Mapping[str, TensorSpec], dtype: str) -> Channel:
    """Return a channel for this model. `Log.describe` fills in the rest."""
    table = {name: (spec.dtype, spec.shape) for name, spec in specs.items()}
    return Channel(
        run_id="-",
        created_at=documents.now(),
        fencing="",
        epoch="",
        dtype=dtype,
        tensors=table,
        tensors_sha256=documents.table_sha256(table),
    )


def _referred(
    ranks: Alone,
    initial: Checkpoint,
    specs: Mapping[str, TensorSpec],
    parts: Mapping[str, TensorRange],
    place: str,
) -> tuple[Reference, Shadow]:
    """Return a reference to a checkpoint of a model, of which this rank has these parts, and a shadow with
    its bits.

    Raises:
        ModelMismatchError, CorruptDataError: as `Checkpoint.ranges`; then all ranks raise.
    """

    def bits(name: str) -> np.ndarray:
        return bits_of(copied(parts[name].held, specs[name].dtype))

    alike = ranks.share(lambda: initial.alike(specs, bits), dict[str, list[str]])
    tied = {}
    for name, others in alike[0].items():
        on_all_ranks = [other for other in others if all(other in found.get(name, ()) for found in alike)]
        if on_all_ranks:
            tied[name] = on_all_ranks[0]
    reference = dataclasses.replace(initial.reference, tied=tied)
    ranges = {name: (part.start, part.stop) for name, part in parts.items()}

    def read() -> Shadow:
        held = _empty(specs, ranges)
        _fill(held, ranges, Checkpoint(reference, initial.files).ranges(specs, ranges))
        return Shadow(specs, ranges, held, place)

    shadow = ranks.all(read)
    digests = ranks.agree(None, [*shadow.fingerprints.values()]).tolist()
    named = {name: fingerprint.to_hex(digest) for name, digest in zip(specs, digests, strict=True)}
    return dataclasses.replace(reference, fingerprints=named), shadow


def _empty(specs: Mapping[str, TensorSpec], ranges: Mapping[str, Range]) -> dict[str, np.ndarray]:
    return {name: np.empty(stop - start, specs[name].bits_dtype) for name, (start, stop) in ranges.items()}


def _fill(bits: Mapping[str, np.ndarray], ranges: Mapping[str, Range], pieces: Iterable[Piece]) -> None:
    """Write pieces of tensors to the bits of their ranges."""
    for name, at, piece_N in pieces:
        first = at - ranges[name][0]
        bits[name][first : first + piece_N.size] = piece_N
