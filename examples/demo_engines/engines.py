"""The engines of the demo: how each is started. Everything else is the same for all of them.

Each follows the channel by itself, and answers `GET /deltasync/status`, `GET /deltasync/digest` and `POST
/v1/completions`. Another engine is another entry.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """One engine."""

    name: str  # its name in the table and the picture
    # its command line, with {model}, {channel}, {port}, and {name}, the model's name in its requests
    command: str
    # the folder of its Python environment, and the `make` target that builds it; None for this one
    environment: str | None
    variables: dict[str, str]  # environment variables of its command
    core: int  # its half of the cores: the first, or that of the trainer

    @property
    def missing(self) -> str | None:
        """Why it cannot be started here, in one sentence."""
        if self.environment is None or (ROOT / self.environment / ".ready").exists():
            return None
        return f"its environment is missing: make {self.environment}/.ready"

    def line(self, **parts: object) -> tuple[list[str], dict[str, str]]:
        """Return the command line, and the environment variables to run it with."""
        programs = (
            Path(sys.executable).parent if self.environment is None else ROOT / self.environment / "bin"
        )
        words = shlex.split(self.command.format(**parts))
        environ = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),  # as this checkout is, wherever the environments were built
            "DELTASYNC_CHANNEL": str(parts["channel"]),
            "DELTASYNC_POLL_INTERVAL_S": "0.1",
            "DELTASYNC_REPLICA_ID": self.name.replace(" ", "-"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **self.variables,
        }
        return [str(programs / words[0]), *words[1:]], environ


ENGINES = (
    Engine(
        "vLLM",
        "vllm serve {model} --worker-extension-cls vllm_plugin.DeltaSyncWorkerExtension --port {port}"
        " --served-model-name {name} --logprobs-mode processed_logprobs --enforce-eager --max-model-len 512"
        " --max-num-seqs 16",
        None,
        {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
            "VLLM_NO_USAGE_STATS": "1",
        },
        0,
    ),
    Engine(
        "SGLang",
        "python -m sglang.launch_server --model-path {model} --port {port} --served-model-name {name} "
        "--attention-backend"
        " torch_native --sampling-backend pytorch --disable-cuda-graph --mem-fraction-static 0.5 "
        "--max-total-tokens 8192"
        " --sleep-on-idle",
        ".venv-sglang",
        {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_SET_CPU_AFFINITY": "0"},
        1,
    ),
    Engine(
        "MLX", "python -m mlx_plugin.server {model} --channel {channel} --port {port}", ".venv-mlx", {}, 1
    ),
    Engine(
        "torch module",
        "python examples/serve_transformers.py {model} --channel {channel} --device cpu --port {port}",
        None,
        {},
        1,
    ),
)
