"""A real SGLang server for tests and demonstrations, in the environment of `make test-sglang`.

with sglang_server.start(checkpoint, "file:///data/run", port, log) as child:
    child.wait_until(sglang_server.answers(port), 300, "to start")
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from deltasync.errors import DeltaSyncError
from demo.processes import Child, get_json

PYTHON = Path(__file__).parents[1] / ".venv-sglang" / "bin" / "python"
"""The interpreter of SGLang's environment."""

ON_A_CPU = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"),
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "8192", "--sleep-on-idle"),
)
"""What the literal command needs here beside the model: torch's own kernels instead of `sgl_kernel`, and
little memory.
"""


def missing() -> str | None:
    """Why no server can be started here, in one sentence; None if one can."""
    if PYTHON.with_name("sglang-ready").exists():
        return None
    return "SGLang's environment is missing: `make .venv-sglang/.ready` builds it from the package index."


def start(
    checkpoint: Path,
    channel: str | None,
    port: int,
    log: Path,
    *arguments: str,
    cores: list[int] | None = None,
    **environ: str,
) -> Child:
    """A server by the README's command. Without a channel it follows nothing."""
    command = [
        PYTHON,
        "-m",
        "sglang.launch_server",
        "--model-path",
        checkpoint,
        "--port",
        str(port),
        *ON_A_CPU,
        *arguments,
    ]
    settings = {
        "DELTASYNC_CHANNEL": channel or "",
        "DELTASYNC_POLL_INTERVAL_S": "0.05",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_SET_CPU_AFFINITY": "0",
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    variables = {name: value for name, value in {**os.environ, **settings, **environ}.items() if value}
    return Child("The SGLang server", command, variables, log, cores)


def answers(port: int) -> Callable[[], bool]:
    """A check whether a server has started, and answers requests or says why it does not yet."""

    def check() -> bool:
        try:
            return get_json(f"http://127.0.0.1:{port}/model_info") is not None
        except DeltaSyncError:
            return False

    return check
