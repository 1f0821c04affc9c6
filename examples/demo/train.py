"""The demo's trainer process: TRL's `AsyncGRPOTrainer` on a task, its weights published by deltasync.

Run: python -m demo.train --model DIR --channel URL --server-url URL --steps N --metrics FILE --published FILE

A task such as Wordle plays against the server at --environment-url, whose token is in
DELTASYNC_ENVIRONMENT_TOKEN; SSL_CERT_FILE names the authority of its certificate, if not a public one. The
process's environment should contain HF_HUB_OFFLINE=1, and OMP_NUM_THREADS=1 if the vLLM server shares the
machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback, TrainerCallback

from demo import gpu, trl_on_cpu
from demo.model import load_task

if TYPE_CHECKING:
    from transformers import TrainerState
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    from trl_callback import DeltaSyncCallback

GENERATIONS_PER_PROMPT = 8
SAMPLES_PER_STEP = 32
MAX_STALENESS_STEPS = 4
MAX_INFLIGHT_REQUESTS = 16  # with TRL's 128, answers are stale before they are used, on two cores


class MetricsFileCallback(TrainerCallback):
    """Appends a JSON line for each optimizer step: `step`, `time_s` since training began, and TRL's logs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began_s = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._began_s = time.monotonic()

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Append the line of this step; the summary at the end of training has no loss and is skipped."""
        if logs is not None and "loss" in logs:
            line = {
                "step": state.global_step,
                "time_s": round(time.monotonic() - self._began_s, 3),
                "reward": None,
            }
            _append(self._path, line | logs)


class DigestsFileCallback(TrainerCallback):
    """Writes down the sha256 of every tensor of each version, for a proof of bits without deltasync's own
    code.

    Args:
        sync: The callback that publishes the weights, which comes before this one.
        path: A file that gets a JSON line for each version, at the first event after the version was encoded:
            its record in `sync.history`, and `sha256` by tensor name, of the trainer's live parameters cast
            to bf16 by torch.
    """

    def __init__(self, sync: DeltaSyncCallback, path: Path) -> None:
        self._sync = sync
        self._path = path
        self._sha256: dict[int, dict[str, str]] = {}  # by step
        self._written = 0

    def on_train_begin(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Digest the initial weights."""
        self._digest(state.global_step, model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what was encoded since the last time."""
        self.write()

    def on_step_end(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Digest the weights of this step."""
        self._digest(state.global_step, model)

    def _digest(self, step: int, model: torch.nn.Module) -> None:
        digests = self._sha256[step] = {}
        for name, param in model.named_parameters():
            bits = param.detach().to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy()
            digests[name] = hashlib.sha256(bits.tobytes()).hexdigest()

    def write(self) -> None:
        """Write what was encoded since the last time; after training, when all is stored, the rest."""
        records = self._sync.history[self._written :]
        self._written += len(records)
        for record in records:
            derived = {
                "changed_fraction": record.changed_fraction,
                "bits_per_changed": record.bits_per_changed,
            }
            _append(
                self._path, dataclasses.asdict(record) | derived | {"sha256": self._sha256.pop(record.step)}
            )


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, default=float) + "\n")


def build_trainer(
    args: argparse.Namespace, callbacks: Sequence[TrainerCallback], weight_transfer: Any = None
) -> AsyncGRPOTrainer:
    """Return the trainer, ready for `train()`; `weight_transfer` syncs the weights if none of the callbacks
    does.
    """
    trl_on_cpu.prepare()
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    options, parts = load_task(args.task).training(args.seed, args.environment_url)
    config = AsyncGRPOConfig(
        output_dir=str(args.metrics.parent / "trainer"),
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=args.samples,
        num_generations=GENERATIONS_PER_PROMPT,
        max_staleness=MAX_STALENESS_STEPS,
        max_inflight_tasks=MAX_INFLIGHT_REQUESTS,
        vllm_server_base_url=args.server_url,
        token_budget=-1,  # a fixed number of samples per step, and no question to the server about its limits
        use_cpu=not gpu.has_gpu(),
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = AsyncGRPOTrainer(
        model=str(args.model),
        args=config,
        **parts,
        weight_transfer=weight_transfer,
        callbacks=[*callbacks, MetricsFileCallback(args.metrics)],
    )
    trainer.remove_callback(PrinterCallback)  # it prints some forty values per step to stdout
    return trainer


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line of this module; `argv` is None for that of the process."""
    parser = argparse.ArgumentParser(prog="python -m demo.train", description="Train the demo's model.")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="checkpoint to start from")
    parser.add_argument("--channel", required=True, metavar="URL", help="channel to publish the weights to")
    parser.add_argument(
        "--server-url", required=True, metavar="URL", help="the vLLM server that follows the channel"
    )
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="optimizer steps (default: 40)")
    parser.add_argument(
        "--samples",
        type=int,
        default=SAMPLES_PER_STEP,
        metavar="N",
        help=f"samples per step (default: {SAMPLES_PER_STEP})",
    )
    parser.add_argument(
        "--replicas", nargs="*", metavar="URL", help="servers to wait for (default: all live replicas)"
    )
    parser.add_argument(
        "--metrics", type=Path, required=True, metavar="FILE", help="file to append JSON lines to"
    )
    parser.add_argument(
        "--published", type=Path, required=True, metavar="FILE", help="file for what was published"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of trainer and prompts (default: 0)"
    )
    parser.add_argument(
        "--task", default="counting", metavar="NAME", help="what the model learns (default: counting)"
    )
    parser.add_argument(
        "--environment-url", metavar="URL", help="the server of a task that plays against one"
    )
    args = parser.parse_args(argv)
    if (load_task(args.task).environment is None) != (args.environment_url is None):
        parser.error("--task wordle needs --environment-url, and counting does not take it")
    return args


def main() -> None:
    """Train, publishing the weights of each step."""
    args = parse_args(None)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    from trl_callback import DeltaSyncCallback

    sync = DeltaSyncCallback(args.channel, replicas=args.replicas)
    digests = DigestsFileCallback(sync, args.published)
    build_trainer(args, [sync, digests]).train()
    digests.write()


if __name__ == "__main__":  # the rollout worker is another process, which imports this file
    main()
