"""The demo's trainer process: TRL's `AsyncGRPOTrainer` on one of its tasks, its weights published by deltasync.

Run: python -m deltasync.demo.train --model DIR --channel URL --server-url URL --steps N --metrics FILE --published FILE

With --task wordle --environment-url URL the model plays against a server of `deltasync.demo.wordle`, guess by guess. Its
token is in DELTASYNC_ENVIRONMENT_TOKEN; SSL_CERT_FILE names the authority of its certificate, if not a public one.

The process's environment should contain HF_HUB_OFFLINE=1, and OMP_NUM_THREADS=1 when the vLLM server shares the machine. The
rollout worker spawns a child process that imports this module again, hence the `__main__` guard at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback, TrainerCallback

from deltasync.demo import TASKS, task, trl_on_cpu
from deltasync.demo.wordle import player
from deltasync.demo.wordle.client import WordleEnvironment
from deltasync.demo.wordle.game import GUESSES
from deltasync.demo.wordle.protocol import TOKEN_VARIABLE

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    from trl_callback import DeltaSyncCallback

LEARNING_RATE = 6e-5  # in 40 steps the reward rises by 0.3; with 4e-5 by 0.2, and a quarter fewer bits change
GENERATIONS_PER_PROMPT = 8
SAMPLES_PER_STEP = 32
MAX_COMPLETION_TOKENS = 3 * task.NUMBER_COUNT + 4  # two digits and a separator each, and some room for surplus
MAX_STALENESS_STEPS = 4
MAX_INFLIGHT_REQUESTS = 16  # TRL's choice of 128 makes the answers stale before they are used, with two cores

_LOGGED = {
    "reward": "reward",
    "reward_std": "reward_std",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "staleness_mean": "sample/staleness_mean",
    "staleness_max": "sample/staleness_max",
    "dropped_stale_total": "sample/dropped_stale_total",
    "completion_tokens_mean": "completions/mean_length",
    "ratio": "ratio",
    "entropy": "entropy",
    "rollout_wait_s": "perf/rollout_wait_s",
    "weight_sync_s": "perf/weight_sync_s",
}
"""Fields of a metrics line, and the names under which TRL logs them."""


class MetricsFileCallback(TrainerCallback):
    """A [`~transformers.TrainerCallback`] that appends one JSON object per optimizer step to a file.

    Each line has `step`, `time_s` (since training began, monotonic) and the fields of `_LOGGED`, null where TRL
    logged none in that step. A line is complete once it ends in a newline.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began_s = time.monotonic()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock."""
        self._began_s = time.monotonic()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Append the line of this step; the summary at the end of training has no loss and is skipped."""
        if logs is None or "loss" not in logs:
            return
        line = {"step": state.global_step, "time_s": round(time.monotonic() - self._began_s, 3)}
        line |= {field: logs.get(name) for field, name in _LOGGED.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class DigestsFileCallback(TrainerCallback):
    """A [`~transformers.TrainerCallback`] that writes down the sha256 of every tensor of each version, for a proof of bits.

    The digests are taken from the trainer's live parameters, cast to bf16 by torch, and owe nothing to deltasync's own code.
    A version's line is written at the first event after it was encoded.

    Args:
        sync: Publishes the weights. Its own events come before.
        path: One JSON object per version is appended here: its record in `sync.history`, and `sha256` by tensor name.
    """

    def __init__(self, sync: DeltaSyncCallback, path: Path) -> None:
        self._sync = sync
        self._path = path
        self._sha256: dict[int, dict[str, str]] = {}  # by step
        self._written = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Digest the initial weights."""
        self._digest(state.global_step, model)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write what was encoded since the last time."""
        self._write()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Digest the weights of this step."""
        self._digest(state.global_step, model)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the last version, which is stored by now."""
        self._write()

    def _digest(self, step: int, model: torch.nn.Module) -> None:
        found = self._sha256[step] = {}
        for name, param in model.named_parameters():
            bits = param.detach().to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy()
            found[name] = hashlib.sha256(bits.tobytes()).hexdigest()

    def _write(self) -> None:
        records = self._sync.history[self._written :]
        self._written += len(records)
        with self._path.open("a", encoding="utf-8") as file:
            for record in records:
                line = dataclasses.asdict(record) | {
                    "changed_fraction": record.changed_fraction,
                    "bits_per_changed": record.bits_per_changed,
                    "sha256": self._sha256.pop(record.step),
                }
                file.write(json.dumps(line) + "\n")


def build_trainer(
    args: argparse.Namespace, callbacks: Sequence[TrainerCallback], weight_transfer: Any = None
) -> AsyncGRPOTrainer:
    """Build the trainer, ready for `train()`.

    Args:
        args: What `parse_args` returns.
        callbacks: Callbacks before the one that writes the metrics.
        weight_transfer: What syncs the weights, if none of the callbacks does.
    """
    trl_on_cpu.prepare()
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    options, parts = _wordle(args) if args.task == "wordle" else _counting(args)
    config = AsyncGRPOConfig(
        output_dir=str(args.metrics.parent / "trainer"),
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=SAMPLES_PER_STEP,
        num_generations=GENERATIONS_PER_PROMPT,
        max_staleness=MAX_STALENESS_STEPS,
        max_inflight_tasks=MAX_INFLIGHT_REQUESTS,
        vllm_server_base_url=args.server_url,
        token_budget=-1,  # a fixed number of samples per step, and no question to the server about its limits
        use_cpu=True,
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


def _counting(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the trainer's configuration, and arguments of the trainer."""
    options = {"learning_rate": LEARNING_RATE, "max_completion_length": MAX_COMPLETION_TOKENS}
    return options, {"reward_funcs": task.counting_reward, "train_dataset": task.prompt_dataset(args.seed)}


def _wordle(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `_counting`; TRL plays the games by calling the environment's tool, and asks it for the reward."""
    factory = functools.partial(WordleEnvironment, args.environment_url, os.environ.get(TOKEN_VARIABLE))
    options = {
        "learning_rate": player.LEARNING_RATE,
        "max_completion_length": player.MAX_GUESS_TOKENS,
        "max_tool_calling_iterations": GUESSES,
    }
    return options, {"environment_factory": factory, "train_dataset": player.game_dataset(args.seed)}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line of this module; `argv` of None means that of the process."""
    parser = argparse.ArgumentParser(prog="python -m deltasync.demo.train", description="Train the demo's model.")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="checkpoint to start from")
    parser.add_argument("--channel", required=True, metavar="URL", help="channel to publish the weights to")
    parser.add_argument("--server-url", required=True, metavar="URL", help="the vLLM server that follows the channel")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="optimizer steps (default: 40)")
    parser.add_argument("--metrics", type=Path, required=True, metavar="FILE", help="JSON lines are appended here")
    parser.add_argument("--published", type=Path, required=True, metavar="FILE", help="what was published goes here")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of trainer and prompts (default: 0)")
    parser.add_argument("--task", choices=TASKS, default="counting", help="what the model learns (default: counting)")
    parser.add_argument("--environment-url", metavar="URL", help="the server of deltasync.demo.wordle, for --task wordle")
    args = parser.parse_args(argv)
    if (args.task == "wordle") != (args.environment_url is not None):
        parser.error("--task wordle needs --environment-url, and no other task takes it")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Train, publishing the weights of each step.

    Returns:
        The exit code.
    """
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    from trl_callback import DeltaSyncCallback

    sync = DeltaSyncCallback(args.channel, ack="all")
    build_trainer(args, [sync, DigestsFileCallback(sync, args.published)]).train()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
