"""Size and speed of the codecs on simulated deltas, beside the machine's own memcpy."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from deltasync import codec
from deltasync.bench import simulate
from deltasync.config import CODECS
from deltasync.kernels import cpu
from deltasync.types import TensorSpec

_REPEATS = 5


def run(fractions: list[float], element_count: int) -> dict[str, Any]:
    """Measure every codec at every changed fraction.

    Returns:
        `machine`, `memcpy_gb_s` (bytes read plus bytes written) and `rows`: codec, changed fraction, bits per changed element,
        GB/s of old and new weights scanned by diff + encode, and changed elements/s decoded and scattered.
    """
    rows = []
    for fraction in fractions:
        old_N, new_N = simulate.delta(fraction, element_count)
        rows += [_measure(name, old_N, new_N) for name in CODECS]
    return {"machine": _machine(), "element_count": element_count, "memcpy_gb_s": _memcpy_gb_s(), "rows": rows}


def _best_s(action: Callable[[], Any]) -> float:
    action()  # compiles, and brings the data in
    times = []
    for _ in range(_REPEATS):
        before = time.perf_counter()
        action()
        times.append(time.perf_counter() - before)
    return min(times)


def _measure(name: str, old_N: np.ndarray, new_N: np.ndarray) -> dict[str, Any]:
    spec = TensorSpec("w", "bfloat16", (old_N.size,))

    def encode() -> bytes:
        index_K, step_K = cpu.diff(old_N, new_N)
        encoder = codec.get(name).encoder()
        encoder.add(spec, index_K, step_K, new_N, "0" * 16)
        return encoder.finish(2, 1)

    payload = encode()
    changed = int((old_N != new_N).sum())
    live_N = old_N.copy()

    def apply() -> None:
        opened = codec.open_payload(payload)
        for patch in codec.get(name).decode(opened, {"w": spec}):
            if patch.index_K is None:
                live_N[:] = patch.data
            else:
                cpu.scatter(0, live_N, patch.index_K, patch.data, patch.absolute, patch.index_K)

    apply()
    if not np.array_equal(live_N, new_N):
        raise AssertionError(f"{name} did not reproduce the bits")
    return {
        "codec": name,
        "changed_fraction": changed / old_N.size,
        "bits_per_changed": 8 * len(payload) / changed,
        "encode_gb_s": (old_N.nbytes + new_N.nbytes) / _best_s(encode) / 1e9,
        "apply_changed_per_s": changed / _best_s(apply),
    }


def _memcpy_gb_s() -> float:
    source = np.ones(1 << 28, np.uint8)
    target = np.empty_like(source)
    return 2 * source.nbytes / _best_s(lambda: np.copyto(target, source)) / 1e9


def _machine() -> str:
    import os

    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}"
