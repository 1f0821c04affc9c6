"""vLLM's API server whose processes kill themselves at a step: `python -m tests.faults_matrix.killing --model ...`

The file that FAULT_AT names tells the step, once it is there. Processes that vLLM spawns import this too.
"""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path
from typing import Any

from tests.faults_matrix import steps

DRIVER_STEPS = ("generation is paused", "all workers have the version, generation is paused")


def reach(step: str) -> None:
    """Die if it is this step's turn."""
    told = Path(os.environ["FAULT_AT"])
    if told.exists() and told.read_text() == step:
        told.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def _in_driver() -> None:
    from vllm_plugin.driver import Driver

    commit = Driver._commit_paused

    async def commit_paused(self: Driver) -> dict[str, Any]:
        reach(DRIVER_STEPS[0])
        reply = await commit(self)
        reach(DRIVER_STEPS[1])
        return reply

    Driver._commit_paused = commit_paused  # type: ignore[method-assign]


if "FAULT_AT" in os.environ:
    steps.patched(reach).__enter__()
    if __name__ == "__main__":
        _in_driver()
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
