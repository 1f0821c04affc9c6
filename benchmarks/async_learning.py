"""AsyncGRPO trained through deltasync and through a dense transfer has the same reward curve, within noise.

    python -m benchmarks.async_learning --out DIR [--steps 40] [--seeds 3] [--json]

from the root of the repository, with the development dependencies. Needs no GPU, and about ten minutes on two
cores. Trains with the demo's task and trainer, on a real vLLM server for each arm:

    dense       every sync writes all weights as a bfloat16 checkpoint, which vLLM reloads itself (`reload_weights`)
    deltasync   every sync publishes to the channel that the server follows, and waits until the server has the version

Asynchronous rollouts depend on how requests were batched, so two runs with the same seed differ; this is the
noise. Writes docs/images/async_learning.png. Exits with 1 if the arms' mean rewards over the last ten steps
differ by more than two standard errors of the difference.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.learning import ENVIRON, begin_dense, plot_rewards, write_dense

ARMS = ("dense", "deltasync")
LAST = 10  # steps whose mean reward is compared
PLOT = Path(__file__).parents[1] / "docs" / "images" / "async_learning.png"


def main() -> None:
    """Run the benchmark by the command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for model, channels and results")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm, at least two")
    parser.add_argument("--arm", choices=ARMS, help="used by the benchmark itself")
    parser.add_argument("--seed", type=int, help="used by the benchmark itself")
    parser.add_argument("--server-url", help="used by the benchmark itself")
    given = parser.parse_args()
    out = given.out.resolve()
    if given.arm is not None:
        train(given.arm, given.server_url, out, given.steps, given.seed)
        return
    rewards = run_all(out, given.steps, given.seeds)
    plot(rewards)
    result = compare(rewards)
    common.emit(given.json, result, lines(result))
    if not result["within_noise"]:
        sys.exit(1)


def run_all(out: Path, steps: int, seeds: int) -> dict[str, list[list[float]]]:
    """Run all arms; return for each arm the rewards of each run, by step."""
    from demo.model import build_checkpoint
    from demo.processes import Child, interrupt_on_sigterm
    from tests.integration import vllm_server

    interrupt_on_sigterm()
    cores = sorted(os.sched_getaffinity(0))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CI": "1"}
    rewards: dict[str, list[list[float]]] = {}
    if not (out / "model").exists():
        build_checkpoint(out / "model", seed=0)
    for arm in ARMS:
        folder = out / arm
        shutil.copytree(out / "model", folder / "model", dirs_exist_ok=True)
        rewards[arm] = []
        with vllm_server.serving(
            folder / "model", "--max-num-seqs", "16", cores=cores[1:], **ENVIRON[arm]
        ) as server:
            for seed in range(seeds):
                print(f"{arm}, seed {seed} ...", file=sys.stderr, flush=True)
                metrics = folder / f"metrics-{seed}.jsonl"
                metrics.unlink(missing_ok=True)
                command = [sys.executable, "-m", "benchmarks.async_learning"]
                command += ["--out", str(folder), "--steps", str(steps), "--seed", str(seed)]
                command += ["--arm", arm, "--server-url", server.url]
                with Child(
                    "The training", command, environ, folder / f"trainer-{seed}.log", cores[:1]
                ) as child:
                    child.wait()
                    child.check()
                rewards[arm].append([json.loads(line)["reward"] for line in metrics.read_text().splitlines()])
    return rewards


def train(arm: str, server_url: str, folder: Path, steps: int, seed: int) -> None:
    """Train once; the demo's trainer appends its metrics to `metrics-<seed>.jsonl` in the folder."""
    from demo import train
    from trl_callback import DeltaSyncCallback

    channel = f"file://{folder}/channel"
    command = [
        "--model",
        str(folder / "model"),
        "--channel",
        channel,
        "--server-url",
        server_url,
        "--steps",
        str(steps),
    ]
    command += [
        "--metrics",
        str(folder / f"metrics-{seed}.jsonl"),
        "--published",
        os.devnull,
        "--seed",
        str(seed),
    ]
    arguments = train.parse_args(command)
    if arm == "dense":
        train.build_trainer(arguments, [], DenseTransfer(folder / "dense", server_url)).train()
    else:
        train.build_trainer(arguments, [DeltaSyncCallback(channel, resume=True)]).train()


class DenseTransfer:
    """Transfers all weights through a directory, as a checkpoint that vLLM reloads. Uses no deltasync."""

    def __init__(self, folder: Path, server_url: str) -> None:
        self._folder = folder
        self._url = server_url

    def init_weight_transfer(self) -> None:
        """Make the directory."""
        begin_dense(self._folder)

    def pause(self) -> None:
        """Do nothing: vLLM reloads between two steps of its engine."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write the checkpoint, and have it reloaded."""
        body = write_dense(self._folder, iterator)
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/collective_rpc", json.dumps(body).encode(), headers)
        urllib.request.urlopen(request, timeout=300).close()

    def resume(self) -> None:
        """Do nothing: nothing was paused."""

    def destroy(self) -> None:
        """Do nothing: nothing is held."""


def compare(rewards: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Return the mean rewards of the last steps, and whether the arms differ by no more than the noise of
    their runs.
    """
    ends = {arm: [statistics.fmean(run[-LAST:]) for run in runs] for arm, runs in rewards.items()}
    difference = statistics.fmean(ends["deltasync"]) - statistics.fmean(ends["dense"])
    noise = math.sqrt(sum(statistics.variance(runs) / len(runs) for runs in ends.values()))
    return {
        "steps": len(rewards["dense"][0]),
        "rewards": rewards,
        "reward_last_10": ends,
        "mean": {arm: statistics.fmean(runs) for arm, runs in ends.items()},
        "difference": difference,
        "standard_error": noise,
        "within_noise": abs(difference) <= 2 * noise,
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text."""
    rows = []
    for arm in reversed(ARMS):
        each = ", ".join(f"{reward:.3f}" for reward in result["reward_last_10"][arm])
        rows.append((arm, each, f"{result['mean'][arm]:.3f}"))
    yield from common.table(("transfer", "each run", "mean"), rows)
    yield f"difference {result['difference']:+.3f}, standard error of the difference {result['standard_error']:.3f}"


def plot(rewards: dict[str, list[list[float]]]) -> None:
    """Plot reward over steps, each run as a thin line, the mean of an arm as a thick one."""
    lines: list[tuple[Sequence[float], dict[str, Any]]] = []
    for arm, color in zip(ARMS, ("tab:orange", "tab:blue"), strict=True):
        lines += [(run, {"color": color, "linewidth": 0.8, "alpha": 0.4}) for run in rewards[arm]]
        mean = [statistics.fmean(step) for step in zip(*rewards[arm], strict=False)]
        lines.append(
            (mean, {"color": color, "linewidth": 2.5, "label": f"{arm}, mean of {len(rewards[arm])}"})
        )
    plot_rewards(PLOT, "AsyncGRPO: deltasync and a dense transfer learn alike", lines)


if __name__ == "__main__":
    common.run(main)
