"""Compile the kernels of the host ahead, so that no step of a trainer or of a replica waits for it.

Small tensors go through the functions that real ones go through, so that the types of all arguments are the real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from deltasync import codec
from deltasync.errors import get_logger
from deltasync.kernels import compiled, cpu, cpu_diff, cpu_rows
from deltasync.live.memory import LiveMemory
from deltasync.live.segments import Segment
from deltasync.tensors import Changed, Delta, Layout, Sparse, TensorSpec, Vector, fingerprint
from deltasync.tensors.bits import nan_bounds, signed_view

logger = get_logger(__name__)

CODECS = "packed", "context"
_MATRIX = 256, 256  # so large that `context` codes it by classes
_MOST = 1 << 31  # elements of a vector from which on positions have 64 bits


class Kinds(NamedTuple):
    """Which kernels are wanted.

    Attributes:
        specs: The tensors of a small model (`of_model`, `of_dtype`).
        codecs: Names of codecs.
        publishes: Whether versions are published here.
        on_host: Whether live weights are in host memory.
    """

    specs: tuple[TensorSpec, ...]
    codecs: tuple[str, ...] = CODECS
    publishes: bool = False
    on_host: bool = True


def of_model(layout: Layout) -> tuple[TensorSpec, ...]:
    """Return the tensors of a small model that needs the kernels of a real one."""
    specs: list[TensorSpec] = []
    for vector in layout.vectors.values():
        largest = max(vector.specs, key=lambda spec: spec.element_count)
        has_matrix = largest.element_count >= _MATRIX[0] * _MATRIX[1]
        specs += of_dtype(largest.dtype, has_matrix=has_matrix, is_large=vector.element_count >= _MOST)
    return tuple(specs)


def of_dtype(dtype: str, *, has_matrix: bool = True, is_large: bool = False) -> list[TensorSpec]:
    """Return small tensors of one dtype. Of a large model there is another one, which takes no memory."""
    shapes = [(1024,), *([_MATRIX] if has_matrix else []), *([(_MOST,)] if is_large else [])]
    return [TensorSpec(f"{dtype}{[*shape]}", dtype, shape) for shape in shapes]


_begun: set[Kinds] = set()
_ends = threading.Event()
threading._register_atexit(_ends.set)  # type: ignore[attr-defined]  # the interpreter then waits for one kernel at most


def start(kinds: Kinds) -> None:
    """Compile in a thread, or load what the cache has; once in a process for each of the kinds."""
    if kinds in _begun:
        return
    _begun.add(kinds)
    try:
        threading.Thread(target=_run, args=(kinds,), name="deltasync-compile").start()
    except RuntimeError:
        return  # the interpreter exits


def _run(kinds: Kinds) -> None:
    try:
        for _ in steps(kinds):
            if _ends.is_set():
                return
    except Exception:
        logger.exception("Kernels could not be compiled ahead, so each is compiled when it is wanted.")


def steps(kinds: Kinds) -> Iterator[None]:
    """Compile the kernels: those first for which a trainer's step waits. Yields between them."""
    with compiled.ahead():
        layout = Layout({spec.name: spec for spec in kinds.specs})
        specs = [spec for spec in kinds.specs if spec.element_count < _MOST]
        old = {spec.name: np.zeros(spec.element_count, spec.bits_dtype) for spec in specs}
        new = {name: bits_N + (np.arange(bits_N.size) % 64 == 1).astype(bits_N.dtype) for name, bits_N in old.items()}
        digests, deltas = dict[str, int](), list[Delta]()
        if kinds.publishes:
            for name, bits_N in old.items():  # for the first anchor
                cpu.take(fingerprint.tensor_key(name), bits_N, bits_N.copy())
                yield
        for width, vector in layout.vectors.items():
            found = _detected(vector, old, new) if kinds.publishes else _changes(vector, old, new)
            deltas.append(Delta(layout, {width: found}))
            yield
        for name, bits_N in new.items():
            digests[name] = cpu.fingerprint(fingerprint.tensor_key(name), bits_N)
            yield
        if kinds.on_host:
            yield from _replicated(layout, old, new, digests, deltas)
        for of, delta in ((codec.get(name), delta) for name in kinds.codecs for delta in deltas):
            changed = {name: digests[name] for name in delta.counts()}
            data = of.encode(delta, lambda name: (new[name], 0), changed, 2, 1).to_bytes()
            yield
            of.decode(codec.open_payload(data), layout, old.__getitem__)
            yield
        if kinds.publishes:
            for name, bits_N in old.items():
                cpu_diff.diff(bits_N, new[name])  # for compactions
                yield


def _changes(vector: Vector, old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]) -> Sparse:
    at = [vector.first_T[t] + np.flatnonzero(old[name] != new[name]) for t, name in enumerate(vector.names) if name in old]
    at_K = np.concatenate(at).astype(vector.index_dtype)
    return Sparse(at_K, np.ones(at_K.size, vector.bits_dtype))


def _detected(vector: Vector, old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]) -> Sparse:
    """Return the same as a trainer's step finds it."""
    held = {name: bits_N.copy() for name, bits_N in old.items()}
    rows = [
        (t, 0, held[name].size, held[name].ctypes.data, new[name].ctypes.data)
        for t, name in enumerate(vector.names)
        if name in held
    ]
    bound_T2 = np.array([nan_bounds(spec) for spec in vector.specs], np.uint64)
    (taken,) = cpu_rows.chunks(np.array(rows, np.int64), vector.first_T, vector.bits_dtype)
    cpu_rows.advance(taken, vector.key_T, bound_T2, vector.bits_dtype)
    found = Sparse(*taken.join(vector.index_dtype, vector.bits_dtype))
    address_T = np.array([held[name].ctypes.data if name in held else 0 for name in vector.names], np.int64)
    cpu_rows.add(vector, address_T - vector.first_T[:-1] * vector.width, found, bound_T2)  # as what a GPU has found
    return found


def _replicated(
    layout: Layout,
    old: Mapping[str, np.ndarray],
    new: Mapping[str, np.ndarray],
    digests: Mapping[str, int],
    deltas: Sequence[Delta],
) -> Iterator[None]:
    """Load, and then follow, with whole tensors and with shards of them."""
    live = {name: signed_view(bits_N.copy()) for name, bits_N in old.items()}
    whole = LiveMemory(layout.specs, {name: [Segment(live[name], (1,), 0)] if name in live else [] for name in layout.specs})
    whole.audit()
    for name, bits_N in new.items():
        received = bits_N.copy()
        received.flags.writeable = False  # as what was fetched
        whole.load([(name, received, digests[name])])
        yield
    for delta in deltas:
        whole.apply(delta)
        yield
    columns = _MATRIX[1] // 2
    shards = {
        name: [
            Segment(live[name].view(_MATRIX)[:, first : first + columns], (_MATRIX[1], 1), first) for first in (0, columns)
        ]
        if name in live and layout.specs[name].shape == _MATRIX
        else []
        for name in layout.specs
    }
    for memory in (whole, LiveMemory(layout.specs, shards)):
        memory.audit()
        yield
        for delta in deltas:
            memory.commit(memory.stage(Changed(delta, dict.fromkeys(delta.counts()))))
            yield
    for name, bits_N in new.items():
        whole.commit(whole.stage_weights([(name, bits_N, None)]))
        yield
