"""The kernels of a GPU without one: the tests beside this file, through Triton's interpreter, in processes of
their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interpreter import RUNS, run_again

FILES = {
    "codec": ("test_device_codec.py", "test_device_work.py"),
    "memory": (
        "test_gpu_diff.py",
        "test_gpu_following.py",
        "test_live_devices.py",
        "test_segment_kernels.py",
    ),
}
TESTS = (
    "test_gpu_diff or test_device or gpu_segments or constant_number or warming or served or python_calls "
    "or test_gpu_following"
)


@pytest.mark.skipif(RUNS, reason="the tests beside this one run as they are")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", FILES)
def test_kernels_through_tritons_interpreter(part: str, tmp_path: Path) -> None:
    run_again(
        [str(Path(__file__).with_name(file)) for file in FILES[part]],
        tmp_path,
        "-k",
        TESTS,
        TRITON_INTERPRET="1",
    )


@pytest.mark.slow
@pytest.mark.skipif(RUNS, reason="the tests beside this one run as they are")
@pytest.mark.timeout(1800)
def test_slow_kernels_through_tritons_interpreter(tmp_path: Path) -> None:
    file = str(Path(__file__).with_name("test_device_codec.py"))
    run_again([file], tmp_path, "-m", "slow", TRITON_INTERPRET="1")
