"""Measure encoding and decoding of `packed` and `context` on this machine's GPU, and check the bytes.

    python -m benchmarks.gpu.codec [--elements 7600000000] [--changed-percent 1] [--lanes 32] [--small] [--json]

Takes less than a minute on an H100 or H200, of which the kernels' compilation is the largest part. Needs
Python 3.11 or newer, torch, triton, numpy, safetensors and msgspec. Without the C extension the classes are
fitted in numpy; the time of that is said apart, because it is the host's. Without a GPU, Triton's interpreter
runs it at a small size, where times mean nothing. Exits with 1 if a check failed.

Weights are normally distributed bfloat16 in the shapes of Qwen2.5-7B. An element changes by the part of its
unit in the last place that one update of constant size is, as at small learning rates.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import common

_BARS_S = {"packed": (0.015, 0.025), "context": (0.060, 0.060)}
_CHUNK = 1 << 27
_ROUNDS = 3


def main() -> None:
    """Run the benchmark by the command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--elements", type=int, default=7_600_000_000, help="fewer if memory is short")
    parser.add_argument("--changed-percent", type=float, default=1.0)
    parser.add_argument("--lanes", type=int, default=32, help="streams that a program codes, a power of two")
    parser.add_argument("--small", action="store_true", help="use a small size, as without a GPU")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        arguments.small = True
    _stand_ins()
    from deltasync.gpu import classes, coder

    classes.LANES = coder.LANES = arguments.lanes
    start = time.perf_counter()
    result = measure(arguments.elements, arguments.changed_percent / 100, arguments.small)
    result["seconds"] = time.perf_counter() - start
    common.emit(arguments.json, result, _lines(result))


def _stand_ins() -> None:
    """Where zstandard is missing, let the codecs be imported: the device's do not need it."""
    if importlib.util.find_spec("zstandard") is None:
        _module("deltasync.codec.planes", compress=lambda number_N: None, decompress=None)


def _module(name: str, **contents: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


def measure(element_count: int, changed_fraction: float, small: bool) -> dict[str, Any]:
    """Return times in seconds, sizes and what was checked."""
    import torch

    from deltasync import codec
    from deltasync.gpu import codec as codec_device
    from deltasync.kernels.backend import accelerator
    from deltasync.tensors import Layout, TensorSpec

    on = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if small:
        shapes = _shapes(1, 24, 40, 70, 8) if on.type == "cpu" else _shapes(2, 1024, 3072, 4096, 512)
        if on.type == "cpu":
            _small_blocks()
    else:
        layers = max(1, min(28, round((element_count - 2 * 152064 * 3584) / 233_000_000)))
        shapes = _shapes(layers, 3584, 18944, 152064, 512)
    layout = Layout({name: TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items()})
    vector = layout.vectors[2]
    delta = _delta(layout, changed_fraction if on.type == "cuda" else 0.04, on)
    steps = delta.steps[2]
    common.say(f"{vector.element_count:,} elements, {len(shapes)} tensors, {steps.changed:,} changes")
    digests = {2: np.arange(len(vector.specs), dtype=np.uint64)}
    places = {2: codec_device.BitAddresses.of(vector, delta.bits[2])}
    pieces = list(delta.split(100 if on.type == "cpu" else 1 << 20))
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name()
        if on.type == "cuda"
        else "Triton's interpreter, where times mean nothing",
        "elements": vector.element_count,
        "tensors": len(shapes),
        "changed": steps.changed,
        "rows": [],
    }
    fitted = _timed_fit(codec_device)
    at_K, bits_N = steps.positions(), delta.bits[2].bits_N
    for name in ("packed", "context"):
        coder = codec_device.DeviceCodec(layout, on, accelerator(on).send)

        def encode(name: str = name, coder: Any = coder, keep: list[bytes] | None = None) -> int:
            size = 0
            for encoded in coder.encode(name, delta, digests, 8, 7, pieces):
                size += sum(array.nbytes for array in encoded.arrays.values())
                if keep is not None:
                    keep.append(encoded.to_bytes())
            return size

        bits_N[at_K] += steps.step_K  # a version is encoded once the shadow has taken it
        began_s = time.perf_counter()
        files: list[bytes] = []
        size = encode(keep=files)
        first_s = time.perf_counter() - began_s
        fitted.clear()
        encode_s = _best(encode, on)
        fit_s = sum(fitted) / _ROUNDS
        encode_bytes, encode_kernels = _peak(encode, on), _profile(encode, on)
        opened = [codec.open_payload(data) for data in files]
        prove_s = _best(lambda coder=coder, opened=opened: coder.decode(opened, places, delta), on)
        checked = _check(name, files[0], delta, pieces[0])
        bits_N[at_K] -= steps.step_K
        began_s = time.perf_counter()
        found = coder.decode(opened, places)[0].steps[2]
        first_s += time.perf_counter() - began_s
        assert torch.equal(found.low_K, steps.low_K), f"{name} decodes to other positions"
        assert torch.equal(found.step_K.view(torch.int16), steps.step_K), f"{name} decodes to other steps"
        del found
        decode_s = _best(lambda coder=coder, opened=opened: coder.decode(opened, places), on)
        row = {
            "codec": name,
            "encode_s": encode_s,
            "fit_s": fit_s,
            "decode_s": decode_s,
            "first_s": first_s,
            "payloads": len(files),
            "bits_per_change": 8 * size / steps.changed,
            "changes_checked": checked,
            "prove_s": prove_s,
            "peak_bytes": encode_bytes,
            "peak_decode_bytes": _peak(lambda coder=coder, opened=opened: coder.decode(opened, places), on),
            "encode_kernels": encode_kernels,
            "decode_kernels": _profile(lambda coder=coder, opened=opened: coder.decode(opened, places), on),
        }
        result["rows"].append(row)
        for line in _row_lines(row):
            common.say(line)
    return result


def _shapes(
    layers: int, hidden: int, inner: int, vocabulary: int, key_value: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of Qwen2.5; with 28 layers 339 tensors."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, hidden)}
    for layer in range(layers):
        of_layer: dict[str, tuple[int, ...]] = {"norm_1": (hidden,), "norm_2": (hidden,)}
        for name, rows in (("q", hidden), ("k", key_value), ("v", key_value)):
            of_layer |= {f"{name}.weight": (rows, hidden), f"{name}.bias": (rows,)}
        of_layer |= {
            "o": (hidden, hidden),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }
        shapes |= {f"{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes | {"norm": (hidden,), "head": (vocabulary, hidden)}


def _small_blocks() -> None:
    from deltasync.codec import tiles, vector

    tiles.BLOCK, vector.GROUP_CHANGED = 997, 50
    tiles.TILE, tiles.SMALL, tiles.LEAST, tiles.FEW = 64, 200, 100, 1


def _timed_fit(module: Any) -> list[float]:
    """Let the host's share of fitting classes be added up in the list returned."""
    times: list[float] = []

    def groups(*arguments: Any) -> Any:
        began_s = time.perf_counter()
        found = inner_groups(*arguments)
        times.append(time.perf_counter() - began_s)
        return found

    inner_groups = module.native.groups
    module.native.groups = groups
    return times


def _delta(layout: Any, changed_fraction: float, on: Any) -> Any:
    """Return a delta, with the old bits."""
    import torch

    from deltasync.gpu.delta import BLOCK, DeviceBits, DeviceDelta, DeviceSparse

    vector = layout.vectors[2]
    count = vector.element_count
    generator = torch.Generator(on).manual_seed(1)
    bits_N = torch.empty(count, dtype=torch.int16, device=on)
    size = None
    at, step = [], []
    for first in range(0, count, _CHUNK):
        part = bits_N[first : first + _CHUNK]
        value = torch.randn(part.numel(), generator=generator, device=on).mul_(0.02).to(torch.bfloat16)
        part.copy_(value.view(torch.int16))
        ulps = torch.exp2(((part >> 7) & 255).to(torch.float32) - 127 - 7).reciprocal_()
        if size is None:
            low, high = 0.0, 1.0
            for _ in range(40):
                size = (low + high) / 2
                low, high = (
                    (low, size)
                    if float((ulps * size).clamp_(max=1).mean()) > changed_fraction
                    else (size, high)
                )
        moved = ulps.mul_(size)
        index = torch.nonzero(torch.rand(part.numel(), generator=generator, device=on) < moved).reshape(-1)
        sign = torch.randint(0, 2, (index.numel(),), generator=generator, device=on) * 2 - 1
        at.append(index + first)
        step.append((moved[index].clamp_(1, 1000).to(torch.int32) * sign).to(torch.int16))
    at_K, step_K = torch.cat(at), torch.cat(step)
    del at, step
    first_T = vector.first_T
    base_B = np.concatenate(
        [np.arange(low, high, BLOCK) for low, high in itertools.pairwise(first_T.tolist())]
    )
    base = torch.from_numpy(base_B).to(on)
    bound = torch.cat((torch.searchsorted(at_K, base), torch.tensor([at_K.numel()], device=on)))
    count_T = np.diff(torch.searchsorted(at_K, torch.from_numpy(first_T).to(on)).cpu().numpy())
    steps = DeviceSparse(at_K.to(torch.int32), step_K, base, bound, count_T)
    runs = np.stack((first_T[:-1], np.diff(first_T), first_T[:-1]), axis=1)
    return DeviceDelta(layout, {2: steps}, {2: DeviceBits(bits_N, runs)})


def _best(run: Callable[[], object], on: Any) -> float:
    import torch

    times = []
    for _ in range(_ROUNDS):
        if on.type == "cuda":
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        run()
        if on.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began_s)
        if on.type == "cpu":
            break
    return min(times)


def _peak(run: Callable[[], object], on: Any) -> int | None:
    """Return the most bytes of the device that it takes in addition."""
    import torch

    if on.type == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _profile(run: Callable[[], object], on: Any) -> list[tuple[str, int, float]]:
    """Return the kernels and copies that take longest: name, launches, milliseconds."""
    import torch

    if on.type == "cpu":
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in profile.events():
        if str(getattr(event, "device_type", "")).endswith("CUDA"):
            times, ms = found.get(event.name, (0, 0.0))
            found[event.name] = times + 1, ms + event.time_range.elapsed_us() / 1e3
    rows = sorted(((name[:60], *numbers) for name, numbers in found.items()), key=lambda row: -row[2])
    return [*rows[:16], ("all", sum(row[1] for row in rows), sum(row[2] for row in rows))]


def _check(name: str, file: bytes, delta: Any, piece: Any) -> int:
    """Compare a first payload with what the host writes; return how many changes it has."""
    from deltasync import codec
    from deltasync.tensors import Delta, Sparse

    vector, steps, bits_N = delta.layout.vectors[2], delta.steps[2], delta.bits[2].bits_N
    count = int(steps.count_T[: piece[2][1]].sum())
    at_K = steps.positions(0, count).cpu().numpy().astype(vector.index_dtype)
    held = Sparse(at_K, steps.step_K[:count].cpu().numpy().view(np.uint16))

    def new(tensor: str) -> tuple[np.ndarray, int]:
        _, first, last = delta.layout.span(tensor)
        return bits_N[first:last].cpu().numpy().view(np.uint16), 0

    digests = {tensor: number for number, tensor in enumerate(vector.names)}
    encoded = codec.get(name).encode(Delta(delta.layout, {2: held}), new, digests, 8, 7)
    assert encoded.to_bytes() == file, f"{name}: the host writes other bytes"
    return count


def _row_lines(row: dict[str, Any]) -> Iterator[str]:
    encode_s, decode_s = _BARS_S[row["codec"]]
    yield (
        f"{row['codec']}: encode {1e3 * row['encode_s']:.1f} ms (bar {1e3 * encode_s:.0f}; of it fitting "
        "classes on the "
        f"host {1e3 * row['fit_s']:.1f}), prove {1e3 * row['prove_s']:.1f}, decode "
        f"{1e3 * row['decode_s']:.1f} ms (bar with "
        f"staging {1e3 * decode_s:.0f}), "
        f"{row['bits_per_change']:.2f} bits a change, {row['payloads']} payloads, {row['changes_checked']:,} "
        "changes as the "
        f"host writes them, peak {(row['peak_bytes'] or 0) / 1e6:.0f} and "
        f"{(row['peak_decode_bytes'] or 0) / 1e6:.0f} MB, "
        f"first {row['first_s']:.1f} s"
    )
    for what in ("encode", "decode"):
        for name, count, ms in row[f"{what}_kernels"]:
            yield f"    {what}: {ms:9.3f} ms {count:5d}x {name}"


def _lines(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['device']}: {result['elements']:,} elements, {result['tensors']} tensors, {result['changed']:,} changes"
    for row in result["rows"]:
        yield from _row_lines(row)
    yield f"{result['seconds']:.0f} s"


if __name__ == "__main__":
    common.run(main)
