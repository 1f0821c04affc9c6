"""Memory of ranks that publish and resume does not grow with the largest tensor."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.integration.test_sharded import torchrun

_MOST_MB = 40
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
"""glibc gives freed pieces back. Otherwise it keeps up to 35 MB more, which vary with the load of the
machine.
"""

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux", reason="the system does not say how much memory is anonymous"
    ),
    pytest.mark.parametrize(
        ("size", "megabytes"),
        [(2, 256), *(pytest.param(size, 512, marks=pytest.mark.slow) for size in (2, 4, 8))],
    ),
]


@pytest.mark.parametrize("codec", ["packed", pytest.param("context", marks=pytest.mark.slow)])
def test_a_tensor_of_half_the_model_takes_40_megabytes_beside_shard_and_shadow(
    tmp_path: Path, size: int, megabytes: int, codec: str
) -> None:
    assert worst_mb(tmp_path, size, megabytes, codec) <= _MOST_MB


def worst_mb(folder: Path, size: int, megabytes: int, codec: str) -> float:
    """The highest peak of any rank."""
    torchrun(size, folder, str(megabytes), codec, script="memory_ranks.py", timeout_s=900, **_ALLOCATOR)
    peaks = [
        peak
        for kind in ("bfloat16", "float32")
        for rank in range(size)
        for peak in json.loads((folder / f"{kind}.{rank}.json").read_text()).values()
    ]
    assert len(peaks) == 6 * size and min(peaks) >= 0, peaks
    return max(peaks)
