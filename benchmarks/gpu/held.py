"""How long a trainer is held on a GPU: checking a stream, comparing it with the shadow there, applying the
difference.

    python -m benchmarks.gpu.held [--elements 7600000000] [--json]

Checks positions and steps of every comparison. Without a GPU, Triton's interpreter runs it at a small size,
and times mean nothing. Takes about a minute on an H100.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import common

ROUNDS = 5


def main() -> None:
    """Run the benchmark by the command line."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--elements", type=int, default=7_600_000_000, help="about how many; fewer if memory is short"
    )
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    result = measure(arguments.elements)
    common.emit(arguments.json, result, lines(result))
    sys.exit(bool(result["failures"]))


def measure(element_count: int) -> dict[str, Any]:
    """Return the rows, and what failed."""
    import torch

    from benchmarks.gpu.model import dense, mixture
    from deltasync.kernels import ACCELERATORS

    if not torch.cuda.is_available():
        ACCELERATORS.add("cpu")
        device, models = (
            torch.device("cpu"),
            [dense(1, 24, 40, 70, 8), mixture(1, 2, 16, 8, 5), dense(1, 8, 16, 40, 8)],
        )
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        share = min(1.0, element_count / 7_600_000_000, torch.cuda.mem_get_info(device)[0] / 60e9)
        layers, groups = max(1, round(28 * share)), max(1, round(48 * share))
        models = [
            dense(layers, 3584, 18944, 152064, 512),
            mixture(groups, 128, 1024, 384, 387),
            dense(2, 3584, 18944, 20000, 512),
        ]
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    cases = [
        ("dense", models[0], torch.bfloat16, (0.01, 0.0, 0.001, 0.1)),
        ("MoE", models[1], torch.bfloat16, (0.01,)),
        ("much changes", models[2], torch.bfloat16, (0.03, 0.5, 1.0)),
        ("dense, float32", models[0], torch.float32, (0.01,)),
        ("dense, unaligned", models[0], torch.int16, (0.01,)),
    ]
    for what, shapes, dtype, fractions in cases:
        try:
            rows += _Case(what, shapes, dtype, device).measure(fractions)
        except Exception as error:  # noqa: BLE001 - the other cases still run; it is reported at the end
            traceback.print_exc()
            failures[what] = f"{type(error).__name__}: {error}"
        if device.type == "cuda":
            torch.cuda.empty_cache()
    name = "no GPU: Triton's interpreter, where times mean nothing"
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
    return {"device": name, "torch": torch.__version__, "rows": rows, "failures": failures}


def _module(weights: dict[str, Any]) -> Any:
    """Return a module of as many modules as tensors, each with one of them."""
    import torch

    root = torch.nn.Module()
    for number, tensor in enumerate(weights.values()):
        part = torch.nn.Module()
        part.weight = torch.nn.Parameter(tensor, requires_grad=False)
        root.add_module(str(number), part)
    return root


class _Case:
    """One model of a trainer, and its shadow."""

    def __init__(self, what: str, shapes: dict[str, tuple[int, ...]], dtype: Any, device: Any) -> None:
        import numpy as np
        import torch

        from benchmarks.gpu.machine import random_bits
        from deltasync.publish.agreement import Alone
        from deltasync.publish.shadow import Shadow
        from deltasync.trainer.source import Source

        self.what, self.device = what, device
        self.sizes = [int(np.prod(shape)) for shape in shapes.values()]
        count = sum(self.sizes)
        skipped = 1 if "unaligned" in what else 0
        if dtype == torch.float32:
            self.flat = torch.empty(count, dtype=torch.float32, device=device)
            for part in self.flat.split(1 << 28):
                part.normal_()
        else:
            self.flat = random_bits(count + skipped, device, 3)[skipped:]
        self.weights: dict[str, Any] = {}
        first = 0
        for (name, shape), size in zip(shapes.items(), self.sizes, strict=True):
            part = self.flat[first : first + size]
            self.weights[name] = (part if dtype == torch.float32 else part.view(dtype)).view(shape)
            first += size
        self.source = Source(Alone(), "bfloat16", None)
        parts = self.source.first(self.weights)
        self.shadow = Shadow.of(self.source.specs, parts, "device", self.source.devices)
        assert self.shadow.size_bytes["device"]

    def measure(self, fractions: tuple[float, ...]) -> Iterator[dict[str, Any]]:
        import torch

        from benchmarks.gpu.machine import random_positions
        from deltasync.trainer.stream import module_tensors

        element_bytes = self.flat.element_size()
        copy_s = self._median_s(lambda: self.flat.clone())
        read_s = copy_s * (element_bytes + 2) / (2 * element_bytes)
        yield self._row("reading both sides, by the rate of a copy", read_s)
        self._compare()  # makes the table, compiles
        if self.what == "dense":
            yield self._row("fingerprints of all", self._median_s(self.shadow._memory.fingerprints))
        for fraction in fractions:
            count = self.flat.numel()
            at_K = (
                random_positions(count, fraction, self.device, 4)
                if fraction
                else torch.empty(0, dtype=torch.int64)
            )
            at_K = at_K.to(self.device)
            times: dict[str, list[float]] = {"compare": [], "apply": []}
            note = ""
            for number in range(ROUNDS + 1):  # the first learns how many changes to expect
                self._change(at_K)
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                compare_s = self._seconds(self._compare)
                if self.device.type == "cuda":
                    note = (
                        f"peak {(torch.cuda.max_memory_allocated() - before) / 1e6:,.0f} MB beside the shadow"
                    )
                found = self.found
                if number < 2:
                    self._check(found, at_K)
                apply_s = self._seconds(lambda found=found: self.shadow.apply(found))
                if number:
                    times["compare"].append(compare_s)
                    times["apply"].append(apply_s)
                self.found = found = None
            compare_s = statistics.median(times["compare"])
            note = f"{compare_s / read_s:.2f} times reading; {note}"
            yield self._row(f"compare, {fraction:.1%}: {at_K.numel():,}", compare_s, note)
            yield self._row(f"apply, {fraction:.1%}", statistics.median(times["apply"]))
            del at_K
        yield self._row(
            "checking the stream", self._median_s(lambda: self.source._again(self.weights.items()))
        )
        module = _module(self.weights)
        yield self._row("finding them in a module", self._median_s(lambda: module_tensors(module)))

    def _change(self, at_K: Any) -> None:
        import torch

        for part_K in at_K.split(1 << 28):
            if self.flat.dtype == torch.float32:
                self.flat.view(torch.int32)[part_K] ^= 1 << 16
            else:
                self.flat[part_K] += 1

    def _compare(self) -> None:
        self.found = self.source.compare(self.shadow, self.weights.items())

    def _check(self, found: Any, at_K: Any) -> None:
        """Positions in the vector are those in `flat`: all tensors are of one width, and in order."""
        import torch

        assert found.changed == at_K.numel(), (found.changed, at_K.numel())
        if found.changed:
            (delta,) = found.pieces
            (steps,) = delta.steps.values()
            for low in range(0, steps.changed, 1 << 27):
                assert torch.equal(steps.positions(low, low + (1 << 27)), at_K[low : low + (1 << 27)]), (
                    "positions"
                )
            if self.flat.dtype != torch.float32:
                assert bool((steps.step_K == 1).all()), "steps"

    def _seconds(self, run: Callable[[], object]) -> float:
        self._synchronize()
        start = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - start

    def _median_s(self, run: Callable[[], object]) -> float:
        run()
        return statistics.median(self._seconds(run) for _ in range(3 if self.device.type == "cuda" else 1))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    def _row(self, what: str, seconds: float, note: str = "") -> dict[str, Any]:
        model = f"{self.what}, {len(self.sizes):,} tensors, {sum(self.sizes) / 1e9:.2f} G"
        row = {"model": model, "what": what, "seconds": seconds, "note": note}
        common.say(f"{model}: {what} {1e3 * seconds:.2f} ms {note}")
        return row


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the table."""
    yield f"{result['device']}, torch {result['torch']}"
    rows = ((row["model"], row["what"], f"{1e3 * row['seconds']:.2f}", row["note"]) for row in result["rows"])
    yield from common.table(("model", "", "ms", ""), rows)
    for name, error in result["failures"].items():
        yield f"FAILED {name}: {error}"


if __name__ == "__main__":
    common.run(main)
