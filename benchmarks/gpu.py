"""The Triton kernels on this machine's GPU, against its memcpy. Runs alone, with torch for CUDA, triton and deltasync:

    python benchmarks/gpu.py [--elements 7600000000] [--changed-percent 1]

Checks first that the kernels equal the numpy reference, then prints milliseconds (median of `--rounds`) and the share of
the memcpy rate that they reach. Bytes are counted as in memcpy, read and written:

    memcpy           what is read and what is written
    diff             both tensors, once; not the marks (3 % of it), nor the second visit to the changed elements
    diff_and_update  the float32 master and the bfloat16 shadow, once; as above
    fingerprint      the tensor
    scatter          per changed element two indices, its data, its old value, and a 32-byte sector read and written
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from deltasync.kernels import DeviceKernels, device_kernels, reference, torch_ops

KEY = 0x9E3779B97F4A7C15
SECTOR_BYTES = 32

Report = Callable[[str, float, int, str], None]


def main() -> None:
    """Check, then measure; exits with one sentence where that is impossible."""
    parser = argparse.ArgumentParser(description="Time the Triton kernels on a GPU, against its memcpy rate.")
    parser.add_argument("--elements", type=int, default=7_600_000_000, help="bfloat16 weights; fewer where memory ends")
    parser.add_argument("--changed-percent", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    if arguments.elements < 1 or arguments.rounds < 1 or not 0 < arguments.changed_percent <= 50:
        parser.error("elements and rounds start at 1; changed-percent lies above 0, up to 50")
    if not torch.cuda.is_available():
        sys.exit("No GPU found: torch.cuda.is_available() is False, so there is nothing to measure here.")
    if importlib.util.find_spec("triton") is None:
        sys.exit("No triton found: install the version that this torch requires, then run this again.")
    device = torch.device("cuda", torch.cuda.current_device())
    _print_machine(device)
    run(device, arguments.elements, arguments.changed_percent / 100, arguments.rounds)


def run(device: torch.device, element_count: int, changed_fraction: float, rounds: int) -> None:
    """Check and measure on one device."""
    _check(device)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    # Per element: old, new and marks; per changed one: indices, steps and the temporaries of torch's swap.
    fitting = int(0.9 * free_bytes / (4.2 + 120 * changed_fraction))
    if fitting < element_count:
        print(f"memory for {fitting:,} of {element_count:,} elements")
        element_count = fitting
    memcpy_rate = _memcpy_rate(device, free_bytes, rounds)
    print(f"memcpy            {memcpy_rate / 1e9:8.1f} GB/s read and written")

    def report(name: str, seconds: float, moved_bytes: int, what: str) -> None:
        rate = moved_bytes / seconds
        print(
            f"{name:16} {1e3 * seconds:9.3f} ms  {rate / 1e9:8.1f} GB/s  {100 * rate / memcpy_rate:5.1f} % of memcpy  {what}"
        )

    torch.cuda.empty_cache()
    _measure_bfloat16(report, device, element_count, changed_fraction, rounds)
    torch.cuda.empty_cache()
    # A float32 master takes twice the memory, and there are two.
    _measure_master(report, device, element_count // 3, changed_fraction, rounds)


def _measure_bfloat16(
    report: Report, device: torch.device, element_count: int, changed_fraction: float, rounds: int
) -> None:
    from deltasync.kernels import gpu

    old_N = _random_bits(element_count, device)
    index_K = _random_indices(element_count, changed_fraction, device)
    step_K = torch.ones(index_K.numel(), dtype=torch.int16, device=device)
    new_N = old_N.clone()
    new_N[index_K] += step_K
    found = gpu.diff(old_N, new_N)
    if not (torch.equal(found[0], index_K) and torch.equal(found[1], step_K)):
        sys.exit("gpu.diff of the large tensor is wrong.")
    what = f"{index_K.numel() / 1e6:.1f} M of {element_count / 1e9:.2f} G bfloat16"
    report("diff", _median_s(lambda: gpu.diff(old_N, new_N), rounds), 2 * old_N.nbytes, what)
    report("fingerprint", _median_s(lambda: gpu.fingerprint(KEY, old_N), rounds), old_N.nbytes, what)
    moved_bytes = index_K.numel() * (index_K.element_size() + 2 * step_K.element_size() + 2 * SECTOR_BYTES)

    def swap(kernels: DeviceKernels) -> float:
        return _median_s(lambda: kernels.swap([(old_N, index_K, step_K)]), rounds)

    report("swap", swap(device_kernels(device)), moved_bytes, what)
    report("swap in torch", swap(torch_ops), moved_bytes, what)


def _measure_master(report: Report, device: torch.device, element_count: int, changed_fraction: float, rounds: int) -> None:
    """The shadow follows two float32 masters in turn, so that every round finds changes."""
    from deltasync.kernels import gpu

    index_K = _random_indices(element_count, changed_fraction, device)
    masters = [torch.randn(element_count, device=device)]
    masters.append(masters[0].clone())
    masters[1][index_K] += 1
    shadow_N = masters[0].to(torch.bfloat16).view(torch.int16)
    turns = itertools.cycle((1, 0))
    seconds = _median_s(lambda: gpu.diff_and_update(shadow_N, masters[next(turns)]), rounds)
    what = f"{index_K.numel() / 1e6:.1f} M of {element_count / 1e9:.2f} G float32 to bfloat16"
    report("diff_and_update", seconds, element_count * 6, what)


def _print_machine(device: torch.device) -> None:
    import triton

    properties = torch.cuda.get_device_properties(device)
    print(
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} SMs; "
        f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"triton {triton.__version__}"
    )


def _check(device: torch.device) -> None:
    """Compare each kernel with the reference on random bits, several blocks and a rest; leaves if one differs."""
    from deltasync.kernels import gpu

    random = np.random.default_rng(0)
    for width in (1, 2, 4, 8):
        old_N = random.integers(0, 256, width * 1_000_003, np.uint8).view(f"u{width}")
        new_N = np.where(random.random(old_N.size) < 0.05, ~old_N, old_N)
        old, new = (torch.from_numpy(x.copy().view(f"i{width}")).to(device) for x in (old_N, new_N))
        found = gpu.diff(old, new)
        same = all(
            np.array_equal(x.cpu().numpy().view(y.dtype), y)
            for x, y in zip(found, reference.diff(old_N, new_N), strict=True)
        )
        before = reference.fingerprint(KEY, old_N)
        value_K, added, check = gpu.prepare(KEY, old, found[0], found[1], False, found[0])
        same &= gpu.swap([(old, found[0], value_K)]) == check
        same &= torch.equal(old, new) and gpu.fingerprint(KEY, new) == reference.fingerprint(KEY, new_N)
        same &= (before + added) % (1 << 64) == reference.fingerprint(KEY, new_N)
        if not same:
            sys.exit(f"The kernels are not the reference at {8 * width} bits.")
    print("kernels equal the reference on 1,000,003 random elements of 8, 16, 32 and 64 bits")


def _median_s(run: Callable[[], object], rounds: int) -> float:
    """Median wall time, the device idle before and after; one more call first, which compiles."""
    run()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _memcpy_rate(device: torch.device, free_bytes: int, rounds: int) -> float:
    """Bytes read and written per second by a copy on the device."""
    source = torch.zeros(min(4 << 30, free_bytes // 4), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_s(lambda: target.copy_(source), rounds)


def _random_bits(count: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(0)
    bits_N = torch.empty(count, dtype=torch.int16, device=device)
    for part in bits_N.split(1 << 30):
        part.random_(-(1 << 15), 1 << 15, generator=generator)
    return bits_N


def _random_indices(count: int, changed_fraction: float, device: torch.device) -> torch.Tensor:
    """Ascending, distinct, with uniform gaps of the right mean; int32 where that holds them, as `index_dtype`."""
    generator = torch.Generator(device).manual_seed(1)
    mean_gap = 1 / changed_fraction
    shape = (int(count * changed_fraction),)
    gap_K = torch.randint(1, max(2, round(2 * mean_gap)), shape, generator=generator, device=device)
    index_K = gap_K.cumsum_(0) - 1
    index_K = index_K[index_K < count]
    return index_K.to(torch.int32) if count < 1 << 31 else index_K


if __name__ == "__main__":
    main()
