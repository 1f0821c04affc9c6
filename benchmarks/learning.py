"""GRPO trained through deltasync and through a dense transfer gives the same parameters, bit for bit.

    python -m benchmarks.learning --out DIR [--steps 20] [--json]

from the root of the repository, with the development dependencies. Needs no GPU, and about five minutes on
two cores. Runs TRL's GRPOTrainer three times from the same seeds, each on a real vLLM server of its own:

    frozen      no weights ever reach the server: the control, whose parameters must differ
    deltasync   every sync publishes to the channel that the server follows
    dense       every sync writes all weights as a bfloat16 checkpoint, which vLLM reloads itself (`reload_weights`)

The server runs one request at a time and every request has a seed, so that tokens depend on the weights alone
and not on how requests were batched. Writes docs/images/learning.png. Exits with 1 unless deltasync and dense
give equal parameters, and frozen others.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import common
from benchmarks.models import digests

ARMS = ("frozen", "deltasync", "dense")
ENVIRON: dict[str, dict[str, str]] = {
    "frozen": {"DELTASYNC_CHANNEL": ""},
    "deltasync": {},
    "dense": {"DELTASYNC_CHANNEL": ""},
}
"""Of the server of each arm: one that follows a channel answers nothing before a version, and refuses other
weights.
"""
LEARNING_RATE = 2e-4  # the demo's rate would hardly move the reward in so few steps
PLOT = Path(__file__).parents[1] / "docs" / "images" / "learning.png"


def main() -> None:
    """Run the benchmark by the command line."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="directory for model, channel and results; a model there is used",
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--arm", choices=ARMS, help="used by the benchmark itself")
    parser.add_argument("--server-url", help="used by the benchmark itself")
    given = parser.parse_args()
    out = given.out.resolve()
    if given.arm is not None:
        train(given.arm, given.server_url, out, given.steps)
        return
    runs = run_all(out, given.steps)
    plot(runs)
    result = compare(runs)
    common.emit(given.json, result, lines(result))
    if not result["as_wanted"]:
        sys.exit(1)


def run_all(out: Path, steps: int) -> dict[str, dict[str, Any]]:
    """Run each arm in a process of its own, each on a server of its own."""
    from demo.model import build_checkpoint
    from demo.processes import Child, interrupt_on_sigterm
    from tests.integration import vllm_server

    interrupt_on_sigterm()
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "model").exists():
        build_checkpoint(out / "model", seed=0)
    results = {}
    for arm in ARMS:
        print(f"{arm} ...", file=sys.stderr, flush=True)
        with vllm_server.serving(out / "model", "--max-num-seqs", "1", **ENVIRON[arm]) as server:
            command = [sys.executable, "-m", "benchmarks.learning", "--out", str(out), "--steps", str(steps)]
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CI": "1"}
            command += ["--arm", arm, "--server-url", server.url]
            with Child("The training", command, environ, out / f"{arm}.log") as child:
                child.wait()
                child.check()
        results[arm] = json.loads((out / f"{arm}.json").read_text())
    return results


def train(arm: str, server_url: str, out: Path, steps: int) -> None:
    """Train once; write DIR/<arm>.json."""
    from trl import GRPOConfig, GRPOTrainer

    from demo import task
    from trl_callback import DeltaSyncCallback, compat

    sync = DeltaSyncCallback(f"file://{out}/channel", ack_timeout_s=120)
    if arm != "deltasync":
        compat.replace_client(lambda base: pushing_client(base, out / "dense", arm))
    config = GRPOConfig(
        output_dir=str(out / arm),
        seed=0,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=task.MAX_COMPLETION_TOKENS,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=server_url,
        generation_kwargs={"seed": 0},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(out / "model"),
        reward_funcs=task.counting_reward,
        args=config,
        train_dataset=task.prompt_dataset(0),
        callbacks=[sync] if arm == "deltasync" else [],
    )
    before = digests(trainer.model.state_dict())
    started = time.perf_counter()
    trainer.train()
    result = {
        "wall_s": time.perf_counter() - started,
        "rewards": [line["reward"] for line in trainer.state.log_history if "reward" in line],
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "before": before,
        "after": digests(trainer.model.state_dict()),
        "parameters": trainer.model.num_parameters(),
        "bytes": [record.payload_bytes for record in sync.history[1:]],
    }
    (out / f"{arm}.json").write_text(json.dumps(result) + "\n")


def pushing_client(base: type, folder: Path, arm: str) -> type:
    """Return TRL's client without deltasync: it writes all weights to `folder` if `arm` is `dense`, and none
    otherwise.
    """

    class PushingClient(base):  # type: ignore[misc,valid-type]
        def init_communicator(self, device: Any = 0) -> None:
            begin_dense(folder)

        def update_named_params(
            self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]
        ) -> None:
            if arm == "dense":
                self._post(f"{self.base_url}/collective_rpc", json=write_dense(folder, named_params))

    return PushingClient


def begin_dense(folder: Path) -> None:
    """Make the directory of a checkpoint, with the config of the model."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((folder.parent / "model" / "config.json").read_bytes())


def write_dense(folder: Path, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Write all weights there; return the body that asks vLLM's `/collective_rpc` to load them."""
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in named_tensors}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}


def compare(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare the arms; `as_wanted` if deltasync equals the dense transfer, the control differs, and every
    tensor moved.
    """
    dense = runs["dense"]
    arms = {}
    for arm, run in runs.items():
        arms[arm] = {
            "equal_tensors": sum(run["after"][name] == digest for name, digest in dense["after"].items()),
            "equal_rewards": sum(
                mine == theirs for mine, theirs in zip(run["rewards"], dense["rewards"], strict=True)
            ),
            "reward_first_5": sum(run["rewards"][:5]) / 5,
            "reward_last_5": sum(run["rewards"][-5:]) / 5,
            "wall_s": run["wall_s"],
            "rewards": run["rewards"],
        }
    sizes = runs["deltasync"]["bytes"]
    moved = all(dense["before"][name] != digest for name, digest in dense["after"].items())
    return {
        "parameters": dense["parameters"],
        "tensors": len(dense["after"]),
        "steps": len(dense["rewards"]),
        "bytes_per_sync": {"deltasync": sum(sizes) / len(sizes), "dense": 2 * dense["parameters"]},
        "arms": arms,
        "as_wanted": moved and runs["deltasync"]["after"] == dense["after"] != runs["frozen"]["after"],
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text."""
    rows = []
    for arm, found in result["arms"].items():
        size = f"{result['bytes_per_sync'].get(arm, 0) / 1e3:,.0f} kB"
        equal = f"{found['equal_tensors']} of {result['tensors']} tensors"
        same = f"{found['equal_rewards']} of {result['steps']} steps"
        rewards = f"{found['reward_first_5']:.3f} / {found['reward_last_5']:.3f}"
        rows.append((arm, size, equal, same, rewards))
    columns = (
        "per sync",
        "parameters equal to dense",
        "rewards equal to dense",
        "reward, first / last 5 steps",
    )
    yield from common.table(("transfer", *columns), rows)
    yield f"{result['parameters']:,} parameters, {result['steps']} steps of GRPO"


def plot(results: dict[str, dict[str, Any]]) -> None:
    """Plot reward over steps."""
    styles = {
        "dense": {"color": "tab:orange", "linewidth": 4, "alpha": 0.5},
        "deltasync": {"color": "tab:blue", "linewidth": 1.2, "marker": "o", "markersize": 3},
        "frozen": {"color": "tab:gray", "linewidth": 1, "linestyle": "--"},
    }
    title = "GRPO, same seeds: deltasync and a dense transfer give the same parameters, bit for bit"
    plot_rewards(
        PLOT, title, [(results[arm]["rewards"], {"label": arm, **style}) for arm, style in styles.items()]
    )


def plot_rewards(target: Path, title: str, lines: Iterable[tuple[Sequence[float], dict[str, Any]]]) -> None:
    """Plot rewards over steps to a file; each line is the rewards and the options of matplotlib's `plot`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for rewards, look in lines:
        axis.plot(range(1, len(rewards) + 1), rewards, **look)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("step")
    axis.set_ylabel("reward")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    common.run(main)
