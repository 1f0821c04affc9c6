"""Size and speed of our codecs and of the peers' encodings on the same deltas, with the bounds and the
machine's memcpy.

Sizes are exact; times are the best of several repeats. Times of encoding are the median of five rounds, each
right after a copy that it is compared with: on a shared machine the speed of memory changes from one second
to the next. Every encoding is applied in place, without a way to undo it; ours also keeps the fingerprint.
`benchmarks.commit` measures commits, which can be undone.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.codec import bounds
from benchmarks.codec.data import Delta, Sample
from benchmarks.codec.peers import PEERS, Peer
from benchmarks.common import best_s, peak_extra_bytes, say, timed
from deltasync import codec
from deltasync.config import CODECS
from deltasync.kernels import native
from deltasync.live import HostMemory, Segment
from deltasync.tensors import Layout, TensorSpec
from deltasync.tensors.bits import signed_view
from deltasync.tensors.delta import joined, of_tensor

_TIMED_DELTAS = 4  # first deltas of a sample that are timed; sizes are of all
_MEMCPY_BYTES = 1 << 30
_ROUNDS = 5
_FINGERPRINT = 0x0123456789ABCDEF

Bits = Mapping[str, np.ndarray]
Encode = Callable[[Bits, Bits], bytes]
Apply = Callable[[bytes, Bits], None]


def run(samples: Iterable[Sample]) -> dict[str, Any]:
    """Measure every encoding on every sample, one at a time.

    Returns `memcpy_gb_s`, bytes read plus bytes written by a thread for each core, and `samples`. Each has
    its `encodings` (sizes, GB/s of old and new weights scanned by diff + encode, alone and as a share of the
    copy before it, changed elements/s decoded and written, and the bytes by which encoding the first delta
    raised resident memory, the payload included) and its `bounds`.
    """
    memcpy_gb_s = _memcpy()
    rows = []
    for sample in samples:
        say(f"measuring {sample.source} {sample.label}: {sample.changed:,} changed elements")
        rows.append(_measure_sample(sample, memcpy_gb_s))
    copies = [encoding.pop("memcpy_gb_s") for row in rows for encoding in row["encodings"]]
    return {"memcpy_gb_s": statistics.median(copies), "samples": rows}


def _measure_sample(sample: Sample, memcpy_gb_s: Callable[[], float]) -> dict[str, Any]:
    return {
        "source": sample.source,
        "label": sample.label,
        "element_count": sample.element_count,
        "delta_count": len(sample.deltas),
        "changed": sample.changed,
        "changed_fraction": sample.changed / sample.element_count / len(sample.deltas),
        "encodings": [
            {"name": name, "systems": systems, **_measure(sample, *functions, memcpy_gb_s)}
            for name, systems, functions in encodings(sample.specs)
        ],
        "bounds": [
            dataclasses.asdict(bound) | {"total_bits": bound.total_bits}
            for bound in bounds.bounds(*sample.flat())
        ],
    }


def encodings(specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, str, tuple[Encode, Apply]]]:
    """Yield name, systems and functions of every encoding, ours first."""
    for name in CODECS:
        yield name, "deltasync", _ours(name, specs)
    for peer in PEERS:
        yield peer.name, peer.systems, _theirs(peer, specs)


def _ours(name: str, specs: Mapping[str, TensorSpec]) -> tuple[Encode, Apply]:
    chosen, layout = codec.get(name), Layout(specs)
    fingerprints = dict.fromkeys(specs, _FINGERPRINT)
    held: list[tuple[Bits, HostMemory]] = []  # of the weights that were written last

    def encode(old: Bits, new: Bits) -> bytes:
        delta = joined(
            [of_tensor(layout, tensor, *native.diff(old[tensor], new[tensor])) for tensor in specs]
        )
        return chosen.encode(delta, lambda tensor: (new[tensor], 0), fingerprints, 2, 1).to_bytes()

    def apply(payload: bytes, live: Bits) -> None:
        # In place and with the fingerprint, as a joining replica does; the peers keep no old values either.
        if not held or held[0][0] is not live:
            segments = {tensor: [Segment(signed_view(bits), (1,), 0)] for tensor, bits in live.items()}
            held[:] = [(live, HostMemory(specs, segments))]
            held[0][1].parts = np.zeros(len(specs), np.uint64)
        ((_, memory),) = held
        delta, _ = chosen.decode(codec.open_payload(payload), layout, live.__getitem__)
        memory.apply(delta)

    return encode, apply


def _theirs(peer: Peer, specs: Mapping[str, TensorSpec]) -> tuple[Encode, Apply]:
    columns = {name: spec.shape[-1] if spec.shape else 1 for name, spec in specs.items()}
    return (
        lambda old, new: peer.encode(old, new, columns),
        lambda payload, live: peer.apply(payload, live, columns),
    )


def _measure(
    sample: Sample, encode: Encode, apply: Apply, memcpy_gb_s: Callable[[], float]
) -> dict[str, Any]:
    payloads = [encode(delta.old, delta.new) for delta in sample.deltas]
    for delta, payload in zip(sample.deltas, payloads, strict=True):
        live = {name: bits.copy() for name, bits in delta.old.items()}
        apply(payload, live)
        if any(not np.array_equal(live[name], delta.new[name]) for name in live):
            raise AssertionError("an encoding did not reproduce the bits")
    sampled = list(zip(sample.deltas, payloads, strict=True))[:_TIMED_DELTAS]
    scanned_bytes = sum(2 * bits.nbytes for delta, _ in sampled for bits in delta.old.values())
    copy_gb_s, encode_gb_s = [], []
    for _ in range(_ROUNDS):
        copy_gb_s.append(memcpy_gb_s())
        encode_s = sum(best_s(lambda delta=delta: encode(delta.old, delta.new)) for delta, _ in sampled)
        encode_gb_s.append(scanned_bytes / encode_s / 1e9)
    shares = [rate / copied for rate, copied in zip(encode_gb_s, copy_gb_s, strict=True)]
    apply_s = sum(_apply_s(delta, payload, apply) for delta, payload in sampled)
    payload_bytes = sum(map(len, payloads))
    return {
        "payload_bytes": payload_bytes,
        "bits_per_changed": 8 * payload_bytes / sample.changed,
        "memcpy_gb_s": statistics.median(copy_gb_s),
        "encode_gb_s": statistics.median(encode_gb_s),
        "encode_of_memcpy": statistics.median(shares),
        "encode_of_memcpy_spread": (min(shares), max(shares)),
        "apply_changed_per_s": sum(delta.changed for delta, _ in sampled) / apply_s,
        "encode_peak_extra_bytes": peak_extra_bytes(
            lambda: encode(sample.deltas[0].old, sample.deltas[0].new)
        ),
    }


def _apply_s(delta: Delta, payload: bytes, apply: Apply) -> float:
    # An encoding that decodes against the old weights must find them, so they are put back before each
    # repeat.
    live = {name: bits.copy() for name, bits in delta.old.items()}

    def restore() -> None:
        for name, bits in delta.old.items():
            live[name][:] = bits

    return best_s(lambda: apply(payload, live), restore)


def _memcpy() -> Callable[[], float]:
    """Return a function that copies 1 GiB with a thread for each core and returns the GB/s."""
    source = np.ones(_MEMCPY_BYTES, np.uint8)
    target = np.zeros_like(source)
    target[:] = 0  # so that no page is new to the process while the clock runs
    cores = os.cpu_count() or 1
    parts = list(zip(np.array_split(target, cores), np.array_split(source, cores), strict=True))
    pool = ThreadPoolExecutor(cores)
    return lambda: (
        2 * source.nbytes / timed(lambda: list(pool.map(lambda part: np.copyto(*part), parts)))[0] / 1e9
    )
