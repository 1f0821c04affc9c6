"""The C extension under ASan and UBSan, fed with hostile input: `python -m tests.fuzz.sanitized [SECONDS]`.

`make fuzz` calls it. Builds the extension anew, and starts itself with it, once for each instruction set. The
codecs' targets read mutated payloads; and the decoders read valid and random streams at every length, from
memory that ends where the arrays end. A read or write beyond one, or undefined behaviour, ends the process
with a report.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TARGETS = ("raw", "packed", "context")


def start(seconds: float) -> None:
    """Build, and run `main` for each instruction set, with the sanitizers' library before all others."""
    with tempfile.TemporaryDirectory() as folder:
        build = [
            sys.executable,
            "setup.py",
            "-q",
            "build_ext",
            "--build-lib",
            folder,
            "--build-temp",
            f"{folder}/temp",
        ]
        subprocess.run(build, cwd=ROOT, env=os.environ | {"SANITIZE": "1"}, check=True)
        (extension,) = Path(folder).glob("deltasync/_native*.so")
        name = subprocess.run(
            ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
        ).stdout
        environ = os.environ | {
            "LD_PRELOAD": name.strip(),
            "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
            "PYTHONMALLOC": "malloc",
            "SANITIZED_EXTENSION": str(extension),
        }
        for level in ("plain", "avx2", "avx512"):
            command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.sanitized", f"{seconds / 3:g}"]
            subprocess.run(command, cwd=ROOT, env=environ | {"DELTASYNC_SIMD": level}, check=True)


def main(seconds: float) -> None:
    """Feed the extension that SANITIZED_EXTENSION names."""
    spec = importlib.util.spec_from_file_location("deltasync._native", os.environ["SANITIZED_EXTENSION"])
    assert spec is not None and spec.loader is not None
    sys.modules["deltasync._native"] = importlib.util.module_from_spec(spec)
    from deltasync.kernels import native

    assert native.extension().__file__ == os.environ["SANITIZED_EXTENSION"]
    native.threads = lambda elements: 2
    counts = {name: _payloads(name, seconds / 5) for name in TARGETS} | {"streams": _streams(seconds / 5)}
    kernels = _kernels(seconds / 5)
    print(f"{native.instructions()}: {counts | {'calls of other kernels': kernels}}", flush=True)


def _payloads(name: str, seconds: float) -> int:
    """Mutate payloads as the fuzzer does, but without coverage."""
    from tests.fuzz import mutate, seeds
    from tests.fuzz.targets import TARGETS as READERS

    rng, done, end = random.Random(name), 0, time.monotonic() + seconds
    inputs = [
        *seeds.payloads(name),
        *(path.read_bytes() for path in (Path(__file__).parent / "corpus" / name).iterdir()),
    ]

    def changed(data: bytes, most: int) -> bytes:
        found = bytearray(data or b"\0")
        for _ in range(rng.choice((1, 1, 2, 8))):
            found[rng.randrange(len(found))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        return bytes(found[: rng.choice((most, most, most, rng.randrange(1, most + 1)))])

    while time.monotonic() < end:
        data = rng.choice(inputs)
        try:
            data = mutate.inside(data, changed, rng)
        except UnicodeError:
            data = changed(data, len(data))
        READERS[name](data)
        done += 1
    return done


def _exact(array: Any) -> memoryview:
    """Return an array's elements in memory of their own, which ends where they do; numpy keeps small blocks
    for itself.
    """
    import numpy as np

    kind = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q", "i4": "i", "i8": "q"}[array.dtype.str[1:]]
    flat = np.ascontiguousarray(array).reshape(-1)
    return memoryview(bytearray(flat.tobytes())).cast(kind)


def _streams(seconds: float) -> int:
    """Decode streams of every length: valid ones cut and damaged, and random words."""
    import numpy as np

    from deltasync.codec import tables
    from deltasync.kernels import native, rans

    extension, done, end = native.extension(), 0, time.monotonic() + seconds
    for seed in itertools.count():
        if time.monotonic() > end:
            return done
        random = np.random.default_rng(seed)
        width, classes, size = (
            int(random.choice([1, 2, 4, 8])),
            int(random.integers(1, 5)),
            int(random.integers(1, 400)),
        )
        bits = np.dtype(f"u{width}")
        old_N = random.integers(0, 256, size * width, np.uint8).view(bits)
        low_C = (np.arange(classes) * (256 // classes)).astype(np.uint8)
        span_C = np.diff(low_C.astype(np.int64), append=256).astype(np.uint8) - np.uint8(1)
        row_BF = np.array([[0, size, size, 1, 0, 8 * width - 8, 255]])
        changed = np.sort(random.choice(size, int(random.integers(1, size + 1)), replace=False)).astype(
            np.int32
        )
        step_K = random.integers(1, 1 << 63, changed.size).astype(bits)
        step_K[step_K == 0] = 1
        new_N = old_N.copy()
        new_N[changed] += step_K
        bound_B = np.array([0, changed.size])
        row_BF[0, 0] = new_N.ctypes.data
        level_C = np.sort(random.integers(0, 100, classes))[::-1]
        group = rans.Classes(low_C, span_C, level_C, np.array([0, classes]))
        ranked, ratio_CC = native.rank(row_BF, bound_B, changed, step_K, group), group.ratio_CC
        freq_TS = tables.fit(native.count(*ranked, ratio_CC))
        words, _ = native.encode(*ranked, freq_TS, ratio_CC)
        held = _exact(old_N)
        row_BF[0, 0] = np.frombuffer(held, np.uint8).ctypes.data

        def decode(
            words: Any,
            count: int,
            held: tuple[Any, ...] = (row_BF, low_C, span_C, freq_TS, ratio_CC),
            bits: Any = bits,
            extension: Any = extension,
        ) -> bool:
            row_BF, low_C, span_C, freq_TS, ratio_CC = held
            at_K, step_K = _exact(np.zeros(count, np.int32)), _exact(np.zeros(count, bits))
            bounds = np.array([0, count]), _exact(words), np.array([[0, words.size]])
            whole: bool = extension.decode_classes(
                2, row_BF, *bounds, low_C, span_C, freq_TS, ratio_CC, at_K, step_K
            )
            if count and not count % 5:
                given = np.zeros(1, np.int64), np.array([[int(row_BF[0, 1])]]), bounds[0]
                extension.decode(2, *bounds[1:], *given, freq_TS[:2], at_K, step_K)
            return whole

        assert decode(words, changed.size)
        for length in range(words.size + 3):
            cut = np.concatenate(
                (words[:length], random.integers(0, 1 << 32, max(0, length - words.size), np.uint32))
            )
            assert decode(cut, changed.size) == (length == words.size) or length != words.size
            decode(random.integers(0, 1 << 32, length, np.uint32), int(random.integers(0, size + 2)))
            if length:
                cut[random.integers(0, length)] ^= np.uint32(1 << int(random.integers(0, 32)))
                decode(cut, int(random.integers(0, size + 1)))
            done += 3


def _kernels(seconds: float) -> int:
    """Compare, add, fingerprint, swap and prepare memory that ends where it ends, at every length and
    offset.
    """
    import numpy as np

    from deltasync.kernels import native
    from deltasync.tensors import Layout, TensorSpec

    done, end = 0, time.monotonic() + seconds
    for seed in itertools.count():
        if time.monotonic() > end:
            return done
        random = np.random.default_rng(seed)
        width, size = (
            int(random.choice([1, 2, 4, 8])),
            int(random.choice([0, 1, 31, 63, 64, 65, 129, 700, 4097, 70_000])),
        )
        bits = np.dtype(f"u{width}")
        old, new = (_exact(random.integers(0, 3, size).astype(bits)) for _ in range(2))
        vector = Layout({"w": TensorSpec("w", f"int{8 * width}", (size,))}).vectors[width]
        places = [np.frombuffer(each, bits) if size else np.empty(0, bits) for each in (old, new)]
        row_RF = np.array([[0, 0, size, *(place.ctypes.data for place in places)]])
        steps, *_ = native.compare(row_RF, vector)
        native.add(vector, np.array([places[0].ctypes.data]), steps)
        assert np.array_equal(*places)
        assert native.fingerprint(1, places[0]) == native.take(1, places[1], places[0])
        line_SC, dim_S2D3 = (
            np.array([[places[0].ctypes.data, 0, 0, 0, size, seed % 2]]),
            np.zeros((1, 2, 8, 3), np.int64),
        )
        dim_S2D3[0, 0, 0] = 1, size, 1
        rows = line_SC, dim_S2D3, np.array([[0, size, 0]]), np.arange(-(-size // 64))
        given = (
            *rows,
            _exact(np.zeros(size, np.int32)),
            _exact(np.zeros(size, bits)),
            np.zeros((3, 1), np.int64),
        )
        assert native.extension().stage(
            2, 64, *given, _exact(np.arange(size, dtype=np.int32)), _exact(np.ones(size, bits))
        )
        assert native.extension().exchange(2, 64, *given)
        done += 6


if __name__ == "__main__":
    (main if "SANITIZED_EXTENSION" in os.environ else start)(
        float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    )
