"""A fixture that runs a module's tests with the kernels of each instruction set, and in numpy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deltasync.kernels import native

LEVELS = ("none", "plain", "avx2", "avx512")


@pytest.fixture(params=LEVELS, scope="module", autouse=True)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTASYNC_SIMD", request.param)
        native.extension.cache_clear()
        assert (native.extension() is None) == (request.param == "none"), native.CURE
        yield request.param
    native.extension.cache_clear()
