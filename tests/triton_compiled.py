"""Compile what production launches, for GPUs that are not there: a driver for Triton that loads and launches
nothing.

The kernels' callers run as they are, on tensors of the host, so that each kernel is compiled for just the
argument types, alignments and constants that it is launched with. What the tensors then hold is worth
nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel for one set of arguments.

    Attributes:
        name: Name of the kernel.
        registers: Registers of each thread (vector registers where there are scalar ones too).
        spilled: Bytes or registers of each thread that did not fit.
        code: As assembly: PTX, or AMD's.
        constants: What is constant in it, by argument.
        binary: Machine code, of NVIDIA's kernels alone.
    """

    name: str
    registers: int
    spilled: int
    code: str
    constants: dict[str, Any]
    binary: bytes

    def lengths(self) -> list[int]:
        """Return how many instructions it has, and then each of its loops, the longest first; inner ones are
        a part of outer ones.
        """
        code = _disassembled(self.binary) if self.binary else self.code
        number, first_of, length_of = 0, dict[str, int](), dict[int, int]()
        for line in code.splitlines():
            label = re.match(r"\s*(\.L\w+):", line)
            if label:
                first_of[label[1]] = number
            elif re.match(r"\s*/\*[0-9a-f]+\*/\s+[A-Z@]|\t[a-z]+_\w+", line):
                number += 1
                to = re.search(r"BRA.*\((\.L\w+)\)|branch\w*\s+(\.L\w+)", line)
                first = first_of.get(to[1] or to[2], number) if to else number
                if number - first > 1:  # not the endless one behind the end
                    length_of[first] = number - first
        return [number, *sorted(length_of.values(), reverse=True)]


class _Driver:
    def __init__(self, target: GPUTarget) -> None:
        self._target = target
        self.kernels: list[Any] = []
        self.launches = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 64 << 10},
            load_binary=lambda *arguments: (object(), 0, 0, 0, 1024),
        )

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(*arguments: object) -> None:
            self.launches += 1

        return launch


@contextlib.contextmanager
def compiling(target: str, *modules: Any) -> Iterator[list[Compiled]]:
    """Within the block kernels are compiled, and not launched; afterwards the list holds those of these
    modules.
    """
    kernels = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, triton.JITFunction)
    ]
    before = driver._active
    driver.set_active(_Driver(TARGETS[target]))
    found: list[Compiled] = []
    for kernel in kernels:
        kernel.device_caches.clear()
    try:
        yield found
        for kernel in kernels:
            for cache, *_ in kernel.device_caches.values():
                found += [_compiled(each) for each in cache.values()]
    finally:
        for kernel in kernels:
            kernel.device_caches.clear()
        driver._active = before


def _compiled(kernel: Any) -> Compiled:
    names = kernel.src.fn.arg_names
    constants = {names[place[0]]: value for place, value in kernel.src.constants.items()}
    if "ptx" in kernel.asm:
        code = kernel.asm["ptx"]
        listing = _ptxas(code)
        registers = re.search(r"Used (\d+) registers", listing)
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", listing)
        assert registers is not None and spilled is not None, listing
        return Compiled(
            kernel.name,
            int(registers[1]),
            int(spilled[1]) + int(spilled[2]),
            code,
            constants,
            kernel.asm["cubin"],
        )
    code = kernel.asm["amdgcn"]
    counts = {
        name: int(value) for name, value in re.findall(r"\.((?:vgpr|sgpr)(?:_spill)?_count):\s+(\d+)", code)
    }
    return Compiled(
        kernel.name,
        counts["vgpr_count"],
        counts["vgpr_spill_count"] + counts["sgpr_spill_count"],
        code,
        constants,
        b"",
    )


def _disassembled(binary: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(_TOOLS / "nvdisasm"), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _ptxas(code: str) -> str:
    """What NVIDIA's assembler, which comes with Triton, says of a kernel."""
    (architecture,) = re.findall(r"^\.target (sm_\w+)", code, re.MULTILINE)
    assembler = _TOOLS / ("ptxas-blackwell" if architecture.startswith("sm_1") else "ptxas")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(code)
        command = [
            str(assembler),
            "-v",
            f"--gpu-name={architecture}",
            str(source),
            "-o",
            str(source.with_suffix(".cubin")),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
