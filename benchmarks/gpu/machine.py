"""The machine, and measurements on it: time, launches, waits and memory of an operation; results and bars."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from deltasync import kernels
from deltasync.gpu.backend import Accelerator
from deltasync.kernels.backend import Backend
from deltasync.live.memory import device_of

_ROUNDS, _PATIENCE_S = 5, 3.0
_WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")


@dataclasses.dataclass(kw_only=True)
class Row:
    """Measurements of one operation."""

    what: str  # name of the operation
    seconds: float  # median
    launches: int | None = None  # number of kernels launched; if interpreted, of Triton's only
    waits: int | None = None  # how often the host waited for the device; None if interpreted
    peak_bytes: int | None = None  # peak of device memory beyond what was used before; None if interpreted
    rate: float | None = None  # bytes per second that it reads and writes, where that is meaningful
    note: str = ""  # anything else


@dataclasses.dataclass(kw_only=True)
class Bar:
    """A bar: `found` may be at most `most`. None if only a GPU can decide it."""

    what: str
    found: float
    most: float
    met: bool | None


class Machine:
    """The machine: a CUDA device, or host tensors and Triton's interpreter.

    Args:
        small: Whether to use small sizes; the interpreter always does.
        counts: Whether launches, waits and memory are counted, in a run by itself under PyTorch's profiler.

    Attributes:
        device: Device of all tensors.
        device_name: Name of the GPU.
        cuda: Version of CUDA or HIP.
        interpreted: Whether kernels are interpreted, because there is no GPU.
        small: Whether sizes are small, so that times mean nothing.
        rows, bars: The results.
    """

    def __init__(self, small: bool, counts: bool = True) -> None:
        self._counts = counts
        self.interpreted = not torch.cuda.is_available()
        self.small = small or self.interpreted
        if self.interpreted:
            kernels.ACCELERATORS.add("cpu")
        self.device = (
            torch.device("cpu") if self.interpreted else torch.device("cuda", torch.cuda.current_device())
        )
        self.device_name = "no GPU: Triton's interpreter, at a small size, where times mean nothing"
        if not self.interpreted:
            properties = torch.cuda.get_device_properties(self.device)
            size = f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} SMs"
            self.device_name = f"{properties.name}, {size}"
        self.cuda = torch.version.cuda or torch.version.hip
        self.rows: list[Row] = []
        self.bars: list[Bar] = []
        self._launched: list[str] = []
        self._count_launches()

    def device_of(self, live: torch.Tensor) -> Backend:
        """As that of `deltasync.live`; if kernels are interpreted, the host's memory stands for a
        device's.
        """
        return _HOST_AS_DEVICE if self.interpreted else device_of(live)

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.interpreted:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the wall time of an operation; the device is idle before and after."""
        self.synchronize()
        start = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - start

    def median_s(self, run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """Return the median time of several runs within `_PATIENCE_S`, each after `before`, which is not
        measured.
        """
        times: list[float] = []
        while not times or (not self.interpreted and len(times) < _ROUNDS and sum(times) < _PATIENCE_S):
            before()
            times.append(self.seconds(run))
        return statistics.median(times)

    def measure(
        self, what: str, run: Callable[[], object], before: Callable[[], object] = lambda: None
    ) -> Row:
        """Measure an operation, each time after `before`, which is not measured, and add it to the rows."""
        row = Row(what=what, seconds=self.median_s(run, before))
        if self._counts or self.interpreted:
            before()
            with self._counted(row):
                run()
        self.rows.append(row)
        return row

    def bar(self, what: str, found: float, most: float, judged: bool = True) -> None:
        """Compare a number with its bar; a time only if there is a GPU."""
        self.bars.append(
            Bar(what=what, found=found, most=most, met=found <= most if judged and not self.small else None)
        )

    @contextlib.contextmanager
    def _counted(self, row: Row) -> Iterator[None]:
        if self.interpreted:
            self._launched.clear()
            yield
            row.launches = len(self._launched)
            return
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before_bytes = torch.cuda.memory_allocated(self.device)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            yield
            row.peak_bytes = torch.cuda.max_memory_allocated(self.device) - before_bytes
        calls = {event.key: event.count for event in profile.key_averages()}
        row.launches = sum(count for key, count in calls.items() if "LaunchKernel" in key)
        # The profiler itself waits once, when it ends.
        row.waits = max(0, sum(count for key, count in calls.items() if key.endswith(_WAITS)) - 1)

    def _count_launches(self) -> None:
        """Count Triton's launches without a profiler."""
        if not self.interpreted:
            return
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def counted(kernel: Any, *arguments: Any, **options: Any) -> Any:
            self._launched.append(kernel.fn.__name__)
            return run(kernel, *arguments, **options)

        InterpretedFunction.run = counted


_HOST_AS_DEVICE = Accelerator(torch.device("cpu"))


def has_triton() -> bool:
    """Return whether triton can run here, on a GPU or as an interpreter."""
    found = importlib.util.find_spec("triton") is not None
    return found and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1")


def random_bits(count: int, device: torch.device, seed: int) -> torch.Tensor:
    """Return bfloat16 bit patterns as int16."""
    generator = torch.Generator(device).manual_seed(seed)
    bits_N = torch.empty(count, dtype=torch.int16, device=device)
    for part in bits_N.split(1 << 30):
        part.random_(-(1 << 15), 1 << 15, generator=generator)
    return bits_N


def random_positions(count: int, changed_fraction: float, device: torch.device, seed: int) -> torch.Tensor:
    """Return ascending distinct positions, int64, with uniform gaps of the right mean."""
    generator = torch.Generator(device).manual_seed(seed)
    most = max(2, round(2 / changed_fraction))
    gap_K = torch.randint(
        1, most, (max(1, int(count * changed_fraction)),), generator=generator, device=device
    )
    at_K = gap_K.cumsum_(0) - 1
    return at_K[at_K < count]
