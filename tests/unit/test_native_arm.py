"""The extension for arm64: compiled here by a cross compiler, its NEON lanes run in an emulator."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import deltasync

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
SOURCE = Path(deltasync.__file__).parent / "_native.c"

pytestmark = [
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER}"),
    pytest.mark.skipif(not SOURCE.exists(), reason="the installed package has no source"),
]

LANES = r"""
#include "_native.c"
#include <stdio.h>
static u64 state = 1;
static u8 next_byte(void) { state = state * 6364136223846793005u + 1442695040888963407u; return (u8)(state >> 56); }
int main(void) {
    u8 old[8 * LANES], bits[8 * LANES];
    for (int round = 0; round < 2000; round++) {
        for (int i = 0; i < 8 * LANES; i++) old[i] = next_byte(), bits[i] = next_byte() & 3 ? old[i] : next_byte();
        u8 low = next_byte(), span = next_byte();
        u64 expected = 0;
        for (int i = 0; i < LANES; i++) expected |= (u64)((u8)(old[i] - low) <= span) << i;
        u64 found = between_plain(old, low, span);
        if (found != expected) return 1;
        for (int w = 1; w <= 8; w *= 2) {
            u64 unlike = 0;
            for (int i = 0; i < LANES; i++) unlike |= (u64)(memcmp(old + i * w, bits + i * w, (size_t)w) != 0) << i;
            if (differing_plain((char *)old, (char *)bits, w) != unlike) return 2;
        }
        for (int lane = 0, n = 0; lane < LANES; lane++)
            if (found >> lane & 1 && nth_plain(found, (u64)n++) != lane) return 3;
    }
    puts("equal");
    return 0;
}
"""


def compile_for_arm(*words: str) -> None:
    flags = [
        "-std=c11",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-function",
        "-DPy_LIMITED_API=0x030B0000",
    ]
    headers = ["-I", sysconfig.get_paths()["include"], "-I", str(SOURCE.parent)]
    subprocess.run([COMPILER, *flags, *headers, *words], check=True, timeout=300)


def test_it_compiles_without_a_warning(tmp_path: Path) -> None:
    compile_for_arm("-c", str(SOURCE), "-o", str(tmp_path / "native.o"))


@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR}")
def test_the_lanes_of_neon_are_those_of_plain_c(tmp_path: Path) -> None:
    source, program = tmp_path / "lanes.c", tmp_path / "lanes"
    source.write_text(LANES)
    # Nothing of Python is called, so its symbols need not be there.
    compile_for_arm(str(source), "-static", "-Wl,--unresolved-symbols=ignore-all", "-lm", "-o", str(program))
    done = subprocess.run([EMULATOR, program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done
