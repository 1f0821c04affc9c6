"""Memory of ranks does not grow with the largest tensor, when they publish and when they resume (`memory_ranks`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.integration.test_sharded import torchrun

_MOST_MB = 192  # 64 before the native core and the shadow that is compared without being written

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system does not say how much memory is anonymous")


@pytest.mark.parametrize(
    ("size", "megabytes"),
    [(2, 256), *(pytest.param(size, 512, marks=pytest.mark.slow) for size in (2, 4, 8))],
)
def test_a_tensor_of_half_the_model_takes_at_most_192_megabytes_beside_shard_and_shadow(
    tmp_path: Path, size: int, megabytes: int
) -> None:
    torchrun(size, tmp_path, str(megabytes), script="memory_ranks.py", timeout_s=900)
    for kind in ("bfloat16", "float32"):
        for rank in range(size):
            peaks = json.loads((tmp_path / f"{kind}.{rank}.json").read_text())
            assert all(0 <= peak <= _MOST_MB for peak in peaks.values()), (kind, rank, peaks)
