"""What a version of a model of 10^12 parameters costs each role: a publisher's rank, a replica's cursor, a relay,
the garbage collection.

    python -m benchmarks.trillion [--ranks 256] [--layers 63] [--experts 632] [--json]

One rank of many runs for real. It compares nothing: its tensors are views of one small table, and which elements
change is drawn. What the other ranks say and store is as much as this one says and stores. A reference
and versions of few changes precede one that changes 1 %, and a compaction follows. Uses no GPU, no network, and
4 GB of memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from benchmarks import common
from benchmarks.age import Counted
from benchmarks.common import peak_extra_bytes, say, table
from deltasync import Retention, open_store
from deltasync.channel import keys
from deltasync.channel.documents import Channel, File, Reference, VersionId, now, sha256_hex, table_sha256
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.codec.base import Encoded
from deltasync.config import PublisherSettings
from deltasync.following.cursor import Cursor
from deltasync.opening.start import open_first
from deltasync.ops import KeepPolicy, Relay, gc
from deltasync.ops.compactor import maintains
from deltasync.publish import BasePublisher, Opened
from deltasync.publish.agreement import Numbers, StreamReader
from deltasync.publish.append import Appender
from deltasync.publish.detect import Difference, HostShadow
from deltasync.publish.pending import Pending
from deltasync.publish.ranges import Range, Stream, TensorRange
from deltasync.publish.shadow import Shadow
from deltasync.publish.upload import UploadQueue
from deltasync.stores.base import ObjectInfo, Store, WrappedStore
from deltasync.stores.retries import RetryStore
from deltasync.tensors import Delta, Fingerprints, Layout, fingerprint
from deltasync.tensors.delta import Sparse
from deltasync.trainer.agreement import Agreement
from deltasync.trainer.source import Source

CHANGED = 0.01
_TOUCHED = 1000  # elements that change in a step that costs what does not depend on the changes
_TOGETHER = 4  # ranks that share each expert
_STEPS = np.array([1, -1, 2, -2])
_SHARES = np.array([0.4, 0.4, 0.1, 0.1])  # of the elements that change, those that change by each step
_PIECE = 1 << 26  # elements whose changes are one piece, as `publish.detect` compares them
_TABLE = 1 << 24  # elements of which all weights are views
_RANK = re.compile(r"000(?=-[0-9]+\.safetensors$)")  # in the name of a part

_Value = TypeVar("_Value")


@dataclasses.dataclass(frozen=True)
class Model:
    """A mixture of experts, and the ranks that train it.

    Attributes:
        experts: Those of a layer, each of three matrices.
        shape: Shape of each of these.
        ranks: Each expert is on four of them, by ranges; what is no expert is on all, by ranges.
    """

    layers: int = 63
    experts: int = 632
    shape: tuple[int, int] = (2048, 4096)
    ranks: int = 256

    @functools.cached_property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """Shape of each tensor, and the group of ranks that hold it; None for all ranks."""
        rows, columns = self.shape
        found: dict[str, tuple[tuple[int, ...], int | None]] = {}
        for layer in range(self.layers):
            for expert in range(self.experts):
                for part in ("gate", "up", "down"):
                    name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                    found[name] = (rows, columns), expert % (self.ranks // _TOGETHER)
            for part in "qkvo":
                found[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = (columns, columns), None
            for part in ("input", "post_attention"):
                found[f"model.layers.{layer}.{part}_layernorm.weight"] = (columns,), None
        return found

    def ranges(self, rank: int) -> dict[str, Range]:
        """Return what a rank holds of each tensor, of those of which it holds anything."""
        found = {}
        for name, (shape, group) in self.tensors.items():
            if group is None or group == rank // _TOGETHER:
                place, of = (rank, self.ranks) if group is None else (rank % _TOGETHER, _TOGETHER)
                count = math.prod(shape)
                found[name] = count * place // of, count * (place + 1) // of
        return found

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(shape) for shape, _ in self.tensors.values())


class Weights:
    """The tensors of the first rank, in bfloat16: views of one table, so that they take no memory."""

    def __init__(self, model: Model) -> None:
        self.model, self.ranges = model, model.ranges(0)
        drawn = 0.02 * torch.randn(_TABLE, generator=torch.Generator().manual_seed(0))
        self._table = drawn.to(torch.bfloat16)
        self.held = sum(stop - start for start, stop in self.ranges.values())

    def view(self, name: str, count: int) -> torch.Tensor:
        """Return this many elements, others for each tensor."""
        return self._table[fingerprint.tensor_key(name) % (_TABLE - count) :][:count]

    @functools.cached_property
    def stream(self) -> dict[str, TensorRange]:
        """What the rank publishes."""
        return {
            name: TensorRange(self.view(name, stop - start), start, self.model.tensors[name][0])
            for name, (start, stop) in self.ranges.items()
        }


class Drawn(HostShadow):
    """A shadow whose bits never change, and that draws which elements differ from it.

    Attributes:
        changes: How many elements differ at the next comparison, about.
    """

    def __init__(self, layout: Layout, ranges: Mapping[str, Range], weights: Weights) -> None:
        bits = {
            name: weights.view(name, stop - start).view(torch.int16).numpy().view(np.uint16)
            for name, (start, stop) in ranges.items()
        }
        super().__init__(layout, ranges, bits)
        self.changes = 0
        self._sums = Fingerprints(layout, {w: vector.key_T.copy() for w, vector in layout.vectors.items()})
        self._random = np.random.default_rng(0)

    def fingerprints(self) -> tuple[Fingerprints, list[str]]:
        """Return made-up ones."""
        return self._sums.copy(), []

    def digests(self, names: Sequence[str]) -> list[int]:
        """Return the made-up fingerprints, as if the bits had been read."""
        return [self._sums[name] for name in names]

    def compare(self, held: Sequence[torch.Tensor]) -> Difference:
        """Draw what differs."""
        (width,) = self._layout.vectors
        vector, count_T = self._layout.vectors[width], self._count_T[width]
        end_T, zero_T = np.cumsum(count_T), vector.first_T[:-1] + self._start_T[width]
        share, pieces, changed_T = self.changes / end_T[-1], list[Delta](), np.zeros_like(count_T)
        for start in range(0, int(end_T[-1]), _PIECE):
            size = min(_PIECE, int(end_T[-1]) - start)
            gaps_K = self._random.geometric(share, int(size * share + 8 * math.sqrt(size * share) + 8))
            index_K = start - 1 + np.cumsum(gaps_K)
            index_K = index_K[index_K < start + size]
            tensor_K = np.searchsorted(end_T, index_K, side="right")
            at_K = index_K - (end_T - count_T)[tensor_K] + zero_T[tensor_K]
            step_K = self._random.choice(_STEPS, index_K.size, p=_SHARES).astype(np.uint16)
            changed_T += np.bincount(tensor_K, minlength=count_T.size)
            if at_K.size:
                steps = Sparse(at_K.astype(vector.index_dtype), step_K)
                pieces.append(Delta(self._layout, {width: steps}))
        return Difference(pieces, {width: changed_T.astype(np.uint64) * np.uint64(fingerprint.VALUE_STEP)})

    def apply(self, difference: Difference) -> None:
        """Take over the fingerprints; the bits stay."""
        self._sums = self._sums.with_gains(difference.gains)

    def gains(self, delta: Delta) -> Any:
        """Return None: that the bits have not changed is no fault. Payloads are compared with the steps."""


class Queue(UploadQueue):
    """The uploads of the first rank, whose last part may go into the record; those of other ranks do not.

    Attributes:
        inline: The part that went into the record.
    """

    inline: Future[File] | None = None

    def encode(
        self, job: Pending, put: Callable[[str, bytes], File], *, rank: int = 0, inline: bool = True
    ) -> tuple[list[Future[File]], Encoded | None, int]:
        """See `UploadQueue`."""
        files, inlined, size = super().encode(job, put, rank=rank, inline=inline)
        if inlined is not None:
            self.inline = self.puts.submit(put, keys.part(rank, len(files) + 1), inlined.to_bytes())
        return files, inlined, size


class OtherRanks(Agreement):
    """The agreement of the first rank with others that do as much as it does. Counts what goes between them.

    Attributes:
        queue: The uploads of the first rank.
        up_bytes: What the first rank says within the last `publish`, as each other does.
        down_bytes: What each of them is answered.
    """

    queue: Queue

    def __init__(self, model: Model, store: Parts) -> None:
        self.rank, self.size = 0, model.ranks
        self._model, self._parts = model, store
        self._store, self._lost = None, ""
        self.forget()
        self.up_bytes = self.down_bytes = 0

    def share(self, action: Callable[[], _Value], kind: Any) -> list[_Value]:
        """Return what the ranks hold."""
        value: Any = action()
        lasts, mine = value
        of = next(iter(mine.values()))
        tables = [
            {
                name: of._replace(shape=self._model.tensors[name][0], start=start, stop=stop)
                for name, (start, stop) in self._model.ranges(rank).items()
            }
            for rank in range(1, self.size)
        ]
        said = [value, *((lasts, each) for each in tables)]
        self.up_bytes, self.down_bytes = _compressed(value), _compressed(said)
        return said

    def first(self, action: Callable[[], _Value], kind: Any = Any, **given: Any) -> _Value:
        """Run it; all go on."""
        if given.get("problem") is not None:
            raise given["problem"]
        return action()

    def all(self, action: Callable[[], _Value]) -> _Value:
        """Run it; it fails nowhere else."""
        return action()

    def agree(self, problem: BaseException | None, numbers: Numbers = ()) -> np.ndarray:
        """Return these numbers: those of the others are 0."""
        if problem is not None:
            raise problem
        self.up_bytes += _compressed(np.asarray(numbers, np.uint64).tobytes())
        self.down_bytes += 8 * len(numbers)  # sums of which none is 0 cannot be compressed
        return np.asarray(numbers, np.uint64)

    def totals(
        self, shadow: Shadow, found: Difference, changed: int, *, needed: bool
    ) -> tuple[int, Fingerprints]:
        """See `Alone`: the others change as many elements."""
        changed, fingerprints = super().totals(shadow, found, changed, needed=needed)
        return changed * self.size, fingerprints

    def say(self, **line: Any) -> None:
        """Say it to nobody."""

    def answers(self, what: str, serial: int, kind: Any) -> list[Any]:
        """Return the parts of the others: as many as those of the first rank, and as large."""
        while self.queue.puts.busy:
            time.sleep(0.01)
        found = [
            [self._parts.as_of(file, rank) for file in self._parts.fresh] for rank in range(1, self.size)
        ]
        self._parts.fresh = []
        if self.queue.inline is not None:
            self._parts.delete(self.queue.inline.result().key)
            self.queue.inline = None
        return found if what == "part" else [(files, 0) for files in found]

    def ended(self, job: Pending, error: Exception | None, digest: str, payload_bytes: int) -> None:
        """Tell nobody."""

    def wait_until_seen(self) -> None:
        """Wait for nobody."""


class Parts(WrappedStore):
    """A store in memory that holds the bytes of equal parts once, or none of them.

    Attributes:
        fresh: Parts that were stored since this was emptied.
    """

    def __init__(self, inner: Store, *, keeps: bool = True) -> None:
        super().__init__(inner)
        self.fresh: list[File] = []
        self._keeps, self._data = keeps, dict[str, bytes]()

    def as_of(self, file: File, rank: int) -> File:
        """Store a part of the first rank as that of another one."""
        key = _RANK.sub(f"{rank:03d}", file.key)
        self._data[key] = self._data[file.key]
        return dataclasses.replace(file, key=key)

    def create(self, key: str, data: bytes) -> None:
        """See `Store`."""
        self.put(key, data) if key.startswith(keys.PARTS) else super().create(key, data)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See `Store`."""
        if not key.startswith(keys.PARTS):
            super().put(key, data)
            return
        if not self._keeps:
            return
        self._data[key] = bytes(data)
        self.fresh.append(File(key=key, bytes=len(data), sha256=sha256_hex(data)))

    def read(self, key: str, most_bytes: int, known: ObjectInfo | None = None) -> bytes:
        """See `Store`."""
        return self._data[key] if key in self._data else super().read(key, most_bytes, known)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `Store`."""
        found = [*super().list(prefix)]
        parts = [
            ObjectInfo(key, len(data), 1.0) for key, data in self._data.items() if key.startswith(prefix)
        ]
        return iter(sorted([*found, *parts], key=lambda info: info.key))

    def delete(self, *names: str) -> None:
        """See `Store`."""
        for key in names:
            self._data.pop(key, None)
        super().delete(*names)


class Opening:
    """The base of the first stream: a checkpoint of these weights, which is the channel's first version. See
    `publish.opened.Beginning`.
    """

    def __init__(self, weights: Weights, source: Source) -> None:
        self.channel: Channel | None = None
        self.source: StreamReader = source
        self.is_resumed = self.begins_again = False
        self._weights = weights
        self.shadow: Shadow | None = None
        self.reference: Reference | None = None

    @property
    def drawn(self) -> Drawn:
        """The memory of the shadow."""
        assert self.shadow is not None and isinstance(self.shadow._memory, Drawn)
        return self.shadow._memory

    def compare(self, named_tensors: Stream, *, may_refer: bool) -> Difference:
        """Take the stream for the checkpoint."""
        self.source.first(named_tensors)
        specs, ranges = self.source.specs, self.source.held[0]
        self.shadow = Shadow(specs, ranges, Drawn(Layout(specs), ranges, self._weights))
        tensors = {name: (spec.dtype, spec.shape) for name, spec in specs.items()}
        self.channel = Channel(
            run_id="-",
            created_at=now(),
            fencing="",
            epoch="",
            dtype="keep",
            tensors=tensors,
            tensors_sha256=table_sha256(tensors),
        )
        digests = {name: fingerprint.to_hex(found) for name, found in self.shadow.fingerprints.items()}
        self.reference = Reference(repo="owner/model", revision="0" * 40, fingerprints=digests)
        return Difference()


class Trainer:
    """The first rank of the trainer: `deltasync.Publisher`, with these parts in place of the real ones."""

    def __init__(self, model: Model, store: Parts) -> None:
        self.weights, self.ranks = Weights(model), OtherRanks(model, store)
        settings = PublisherSettings(dtype="keep", shadow="host")
        state, log = open_first(RetryStore(store, 0, 0.1), settings, False, {})
        reader = ChannelReader(log.store)
        retention = Retention(compact_every=_COMPACTED)
        maintenance = maintains(reader, log, retention, {}, (), None, self.ranks)
        self.opening = Opening(self.weights, Source(self.ranks, "keep", None))
        self.ranks.queue = Queue(Appender(log, maintenance, self.ranks, {}), settings.codec)
        self.publisher = BasePublisher(
            Opened(
                store=log.store,
                settings=settings,
                run_id=state.run_id,
                version=0,
                resumes=False,
                agreement=self.ranks,
                log=log,
                queue=self.ranks.queue,
                start=self.opening,
                check_step=lambda *_: None,
            )
        )

    def publish(self, step: int, changes: int = 0) -> dict[str, Any]:
        """Publish a version in which this rank changes about so many elements. Return what it costs."""
        found: dict[str, Any] = {}
        if step:
            self.opening.drawn.changes = changes
        self.ranks.up_bytes = self.ranks.down_bytes = 0
        before_s = time.process_time()

        def act() -> None:
            receipt = self.publisher.publish(self.weights.stream, step=step)
            found["held_s"] = receipt.held_s
            receipt.wait(3600)
            found["changed"], found["payload_bytes"] = receipt.changed, receipt.payload_bytes

        found["memory_bytes"] = peak_extra_bytes(act)
        found["cpu_s"] = time.process_time() - before_s
        return found | {"up_bytes": self.ranks.up_bytes, "down_bytes": self.ranks.down_bytes}


_COMPACTED = 8  # versions from one compaction to the next


def bound_bits() -> float:
    """Return the bits that a changed element takes at least: those of its position, and of its step."""
    position = -math.log2(CHANGED) - (1 - CHANGED) / CHANGED * math.log2(1 - CHANGED)
    return position - float((_SHARES * np.log2(_SHARES)).sum())


def run(
    ranks: int, layers: int, experts: int, columns: int = 4096, changed: float = CHANGED
) -> dict[str, Any]:
    """Publish as one rank of many; then read, relay and collect the channel."""
    model = Model(layers, experts, (columns // 2, columns), ranks)
    store = Parts(open_store(f"memory://trillion-{id(model)}"))
    found: dict[str, Any] = {"tensors": len(model.tensors), "parameters": model.parameters, "ranks": ranks}
    trainer = Trainer(model, store)
    held = found["held"] = trainer.weights.held
    found["shard_tensors"] = len(trainer.weights.stream)
    say(f"{model.parameters:.3g} parameters in {len(model.tensors):,} tensors, {held:.3g} at a rank")
    found["reference"] = trainer.publish(0)
    found["first"], *touched = [trainer.publish(step, _TOUCHED) for step in range(1, _COMPACTED)]
    found["touched"] = sorted(touched, key=lambda each: each["memory_bytes"])[len(touched) // 2]
    say("versions of a few changes are stored")
    counted = Counted(store)
    take = _take(counted)
    found["step"] = trainer.publish(_COMPACTED, round(changed * held))
    found["reading"] = {"a replica's cursor, a version": _measured(counted, take)}
    trainer.publisher.close()
    say("a version and a compaction are stored")
    found["stored"] = _stored(store)
    for name, make in READING.items():
        counted = Counted(store)
        found["reading"][name] = _measured(counted, make(counted))
        say(f"{name}: {found['reading'][name]['cpu_s']:.1f} s")
    return found


def _stored(store: Parts) -> dict[str, Any]:
    """Return the sizes of the documents, and how many parts the newest version and the compaction have."""
    reader = ChannelReader(store)
    ((_, info),) = reader.compactions()
    records = {
        "reference": reader.numbered(1),
        "record": reader.numbered(1 + _COMPACTED),
        "compaction": reader.stored(info.key),
    }
    parts = {name: len(stored.record.payload_files) for name, stored in records.items()}
    sizes = {name: stored.size for name, stored in records.items()}
    return {"channel_bytes": len(reader.channel_data), "bytes": sizes, "parts": parts}


def _join(store: Store) -> Callable[[], object]:
    """Find the way to the newest version, as a replica that begins."""
    return lambda: Cursor(ChannelReader(store), prefetch=False).next(None)


def _plan(store: Store) -> Callable[[], object]:
    """The same, by one that has read channel.json."""
    reader = ChannelReader(store)
    newest = reader.newest_version()
    assert newest is not None and reader.specs
    return lambda: find_chain(reader, None, newest)


def _take(store: Store) -> Callable[[], object]:
    """Take the next version, as a replica that has the newest one."""
    cursor = Cursor(ChannelReader(store), prefetch=False)
    newest: VersionId | None = None
    while chain := cursor.next(newest):
        newest = chain[-1].version
    return lambda: cursor.next(newest)


def _relay(store: Store) -> Callable[[], object]:
    """Copy the channel to a place that keeps no parts."""
    relay = Relay(ChannelReader(store), [Parts(open_store(f"memory://copy-{id(store)}"), keeps=False)])
    return relay.step


def _collect(store: Store) -> Callable[[], object]:
    """Delete all but the newest version and what leads to it."""
    return lambda: gc(ChannelReader(store), KeepPolicy(last=1), grace_s=0)


READING: dict[str, Callable[[Store], Callable[[], object]]] = {
    "a replica's cursor, a join": _join,
    "its plan": _plan,
    "a relay, all of the channel": _relay,
    "gc, with one version kept": _collect,
}


def _measured(counted: Counted, act: Callable[[], object]) -> dict[str, Any]:
    """Return the requests, the seconds of a processor and the memory that a role takes."""
    counted.requests.clear()
    before_s = time.process_time()
    memory_bytes = peak_extra_bytes(act)
    cpu_s = time.process_time() - before_s
    return {"requests": counted.requests.total(), "cpu_s": cpu_s, "memory_bytes": memory_bytes}


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text."""
    yield from bars(result)
    yield ""
    yield from roles(result)


def bars(result: dict[str, Any]) -> Iterator[str]:
    """Yield what was asked for, and what was found."""
    step, stored, held = result["step"], result["stored"], result["held"]
    few_bytes, bits = result["touched"]["memory_bytes"], 8 * step["payload_bytes"] / step["changed"]
    rows = [
        ("record of a version that changes 1 %", "2 MB", _mb(stored["bytes"]["record"])),
        ("the same of a compaction of all", "", _mb(stored["bytes"]["compaction"])),
        ("plan of a join", "1 s", f"{result['reading']['its plan']['cpu_s']:.2f} s"),
        (
            "a rank's memory in a publish, for 1,000 parameters of its shard, few of which change",
            "2 bytes",
            f"{1000 * few_bytes / held:.1f} bytes: {few_bytes / result['tensors']:.0f} for each tensor",
        ),
        ("bits of a changed element", f"{bound_bits():.2f} at least", f"{bits:.2f}"),
    ]
    yield from table(("", "bar", "found"), rows)


def roles(result: dict[str, Any]) -> Iterator[str]:
    """Yield what each role takes."""
    rows = []
    steps = {
        "the reference": "reference",
        "few changes, after it": "first",
        "few changes": "touched",
        "1 % changed": "step",
    }
    for name, key in steps.items():
        found = result[key]
        moved = f"{found['up_bytes'] / 1e3:,.1f} kB up, {found['down_bytes'] / 1e3:,.1f} kB down"
        rows.append(
            (f"a publisher's rank: {name}", moved, f"{found['cpu_s']:.2f} s", _mb(found["memory_bytes"]))
        )
    for name, found in result["reading"].items():
        requests = f"{found['requests']:,} requests"
        rows.append((name, requests, f"{found['cpu_s']:.2f} s", _mb(found["memory_bytes"])))
    yield from table(("role", "asks or says", "processor", "more memory"), rows)


def _mb(size: int | None) -> str:
    return "?" if size is None else f"{size / 1e6:,.2f} MB"


def _compressed(value: object) -> int:
    return len(zlib.compress(msgspec.msgpack.encode(value), 1))


if __name__ == "__main__":
    common.command(
        __doc__,
        run,
        lines,
        common.option("--ranks", type=int, default=256, help="ranks of the trainer, a multiple of 4"),
        common.option("--layers", type=int, default=63, help="layers of the model"),
        common.option("--experts", type=int, default=632, help="experts of each layer"),
    )
