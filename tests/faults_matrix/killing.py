"""vLLM's API server whose processes kill themselves at a step: `python -m tests.faults_matrix.killing --model ...`

The file that FAULT_AT names tells the step, once it is there. Nothing of deltasync is imported here before vLLM has started
its workers: they stumble over numba if it is there first.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

DRIVER_STEPS = ("generation is paused", "all workers have the version, generation is paused")


def reach(step: str) -> None:
    """Die if it is this step's turn."""
    told = Path(os.environ["FAULT_AT"])
    with contextlib.suppress(FileNotFoundError):  # nothing is told, or another worker was faster
        if told.read_text() == step:
            told.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def _patch_driver() -> None:
    """Once vLLM has loaded the plugin."""
    while (driver := getattr(sys.modules.get("vllm_plugin.driver"), "Driver", None)) is None:
        time.sleep(0.01)
    commit = driver._commit_paused

    async def commit_paused(self: Any) -> dict[str, Any]:
        reach(DRIVER_STEPS[0])
        reply: dict[str, Any] = await commit(self)
        reach(DRIVER_STEPS[1])
        return reply

    driver._commit_paused = commit_paused


if __name__ == "__main__":
    threading.Thread(target=_patch_driver, daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
