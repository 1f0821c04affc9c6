"""vLLM's API server whose processes kill themselves at a step: `python -m tests.kills.killing --model ...`

The file that FAULT_AT names tells the step, once it is there."""

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
    while (target := getattr(sys.modules.get("deltasync.serve.shards"), "ShardsTarget", None)) is None:
        time.sleep(0.01)
    commit = target._exchanged

    def commit_and_reach(self: Any, name: str) -> Any:
        reach(DRIVER_STEPS[0])
        done = commit(self, name)
        reach(DRIVER_STEPS[1])
        return done

    target._exchanged = commit_and_reach


if __name__ == "__main__":
    threading.Thread(target=_patch_driver, daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
