from __future__ import annotations

import importlib.util
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Threads of torch that wait for one another spin. On cores that several workers share, and the processes that
# they start, a step that computes for 10 ms spins for 250.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pytest
import torch

from deltasync.kernels import native
from deltasync.tensors.bits import bits_of
from tests.interpreter import RUNS

if native.extension() is None and os.environ.get("DELTASYNC_SIMD") != "none":
    raise pytest.UsageError(f"deltasync's C extension is not built here. {native.CURE}")
os.environ["HF_HUB_OFFLINE"] = "1"
# Programs that tests start find what tests find (pytest's `pythonpath`).
ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [f"{ROOT}", f"{ROOT}/examples", os.environ.get("PYTHONPATH")])
)
# programs that tests start would compile deltasync anew, each of them
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
for _variable in [name for name in os.environ if name.startswith("DELTASYNC_")]:
    del os.environ[_variable]

# Fixtures that many files use. Environments of one engine have no S3 server.
pytest_plugins = ["tests.profiles", "tests.hub.fixtures", "tests.servers.clouds"]
if importlib.util.find_spec("moto") is not None:
    pytest_plugins += ["tests.servers.s3"]
pytest_plugins += ["tests.writers"]

_LEFT_OUT = {}
if "LONG_TESTS" not in os.environ:
    _LEFT_OUT["slow"] = "tests that are marked slow; make test-long runs them"
if not RUNS:
    _LEFT_OUT["gpu"] = (
        "tests of GPU kernels by themselves; test_interpreted.py runs them through Triton's interpreter"
    )

# Those that start vLLM, or import it, and those that import TRL: ten seconds for each process that does.
_TOGETHER = {
    "vLLM": re.compile(r"/test_(vllm\w*|trl_server|salt|compose|wordle_player)\.py\b"),
    "TRL": re.compile(r"/test_(trl_(?!server)\w*|curves|jobs)\.py\b"),
}
# Each test of these is a process of its own, which any worker may take.
_APART = re.compile(r"/test_(simulator|interpreted)\.py\b")


def _together(nodeid: str) -> str | None:
    return next((name for name, files in _TOGETHER.items() if files.search(nodeid)), None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes whole modules, one of them all that start vLLM, whose processes spin while they wait,
    and one all that import TRL.

    Tests that wait for a process of their own are taken one by one.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            alone = nodeid if _APART.search(nodeid) else str(super()._split_scope(nodeid))
            return _together(nodeid) or alone

    config.option.loadscopereorder = False  # modules are taken in the order of collection
    return Scheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run here and what is slow, and begin with what takes longest."""
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in _LEFT_OUT)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    if hasattr(config, "workerinput"):
        last = len(_TOGETHER) + 1
        order = {name: place for place, name in enumerate(_TOGETHER)}
        items.sort(
            key=lambda item: order.get(_together(item.nodeid), last - bool(_APART.search(item.nodeid)))
        )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason in _LEFT_OUT.values():
        terminalreporter.write_line(f"LEFT OUT: {reason}")


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
