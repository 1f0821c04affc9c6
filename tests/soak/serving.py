"""vLLM's API server for a soak: `python -m tests.soak.serving --model ...`

The clock of this process can be moved. Before it serves a version it writes down, in the file that SOAK_SERVED names, the
digest of the version and one of the bits that are live."""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.soak import clock


def _patch_driver() -> None:
    """Once vLLM has loaded the plugin."""
    while (driver := getattr(sys.modules.get("vllm_plugin.target"), "EngineTarget", None)) is None:
        time.sleep(0.01)
    announce, served = driver._announce, Path(os.environ["SOAK_SERVED"])

    def noting(self: Any, version: Any) -> None:
        if version is not None:
            from tests.soak.settings import digest_of, note

            note(served, [version.sha256, digest_of(self.workers.digest())])
        announce(self, version)

    driver._announce = noting


if __name__ == "__main__":
    clock.follow(Path(os.environ["SOAK_CLOCK"]))
    threading.Thread(target=_patch_driver, daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
