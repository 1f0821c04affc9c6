from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from deltasync.bits import bits_of

os.environ["HF_HUB_OFFLINE"] = "1"
for _variable in [name for name in os.environ if name.startswith("DELTASYNC_")]:
    del os.environ[_variable]

# No deadline: the first call of a numba kernel compiles it.
settings.register_profile("deltasync", deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("deltasync"), max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deltasync"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "LONG_TESTS" in os.environ:
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="only with LONG_TESTS=1, as in make test-long"))


def assert_same_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        np.testing.assert_array_equal(bits_of(found[name]), bits_of(tensor), err_msg=name)


@pytest.fixture
def memory_url() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture(params=["memory", "file"])
def channel_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/channel"
