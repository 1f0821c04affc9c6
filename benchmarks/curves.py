"""Reward by the age of the rollouts' weights, and equal parameters by deltasync and by dense copies: GRPO in
one process.

    python -m benchmarks.curves DIR [--steps 65] [--seeds 3] [--json]

from the root of the repository, with the development dependencies. Needs no GPU and no server; a run of 65
steps takes a minute of one core, and there are 18. Finished runs in DIR are skipped, so an interrupted
command can be repeated.

TRL's GRPOTrainer trains the demo's model. A second copy of the model, in bfloat16, makes the rollouts. It
gets the trainer's weights before each step, each 4th or each 16th, and makes the samples of so many steps at
once:

    deltasync   the callback publishes a version, and the copy follows the channel
    dense       all weights are cast and copied

Rewards, bytes and parameters are measured. Times are not: they follow from the declared costs below, for a
model of 8 B parameters. Writes docs/images/curves.png. Exits with 1 unless both transfers end with equal
parameters in every run.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import deltasync
from benchmarks import common
from benchmarks.models import digests

TRANSFERS = ("deltasync", "dense")
EACH = {1: "each step", 4: "each 4th", 16: "each 16th"}
"""How often there is a version, in steps of the trainer."""

PLOT = common.ROOT / "docs" / "images" / "curves.png"

STEP_S = 10.0  # declared: one optimizer step; samples are made meanwhile
DENSE_S = (
    2 * 8.19e9 * 8 / 10e9
)  # declared: the bfloat16 weights of Qwen3-8B on a line of 10 Gbit/s, which the step waits for
REACHED = 0.75  # the reward whose declared time is shown, as the mean of the samples of `WINDOW` steps
WINDOW = 4

_PROMPTS, _GENERATIONS = 4, 8  # of a step
_LEARNING_RATE = 2e-4


def measure(folder: Path, steps: int, seeds: int) -> dict[str, Any]:
    """Make the runs that are missing, and compare them."""
    from demo.model import build_checkpoint

    torch.set_num_threads(1)
    base = folder / "model"
    if not base.exists():
        build_checkpoint(base, seed=0)
    runs = []
    for every in EACH:
        for seed in range(seeds):
            for transfer in TRANSFERS:
                path = folder / f"{transfer}-{every}-{seed}-{steps}.json"
                if not path.exists():
                    common.say(f"{path.stem} ...")
                    path.write_text(
                        json.dumps(train(base, folder / path.stem, transfer, every, seed, steps)) + "\n"
                    )
                    gc.collect()
                runs.append(json.loads(path.read_text()))
    return compare(runs, steps)


def train(base: Path, folder: Path, transfer: str, every: int, seed: int, steps: int) -> dict[str, Any]:
    """Train once, with files in `folder`. Return the rewards with the step that they were made for, and the
    parameters.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from demo import task
    from trl_callback import DeltaSyncCallback

    generator = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    sync = DeltaSyncCallback(f"memory://{folder.resolve()}", publish_steps=every)

    def refresh(trained: torch.nn.Module) -> None:
        if transfer == "dense":
            with torch.no_grad():
                for ours, theirs in zip(generator.parameters(), trained.parameters(), strict=True):
                    ours.copy_(theirs)
            return
        publisher = sync.weight_transfer.publisher
        assert publisher is not None
        publisher.flush()
        following.sync()

    def roll_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        refresh(trainer.model)
        asked = [
            tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False)
            for each in prompts
        ]
        padded = tokenizer.pad({"input_ids": asked}, return_tensors="pt")
        with torch.no_grad():
            made = generator.generate(**padded, do_sample=True, max_new_tokens=task.MAX_COMPLETION_TOKENS)
        answers = [
            _cut(row, tokenizer.eos_token_id) for row in made[:, padded["input_ids"].shape[1] :].tolist()
        ]
        return {"prompt_ids": asked, "completion_ids": answers, "logprobs": None}

    trainer = GRPOTrainer(
        model=str(base),
        reward_funcs=task.counting_reward,
        train_dataset=task.prompt_dataset(seed),
        rollout_func=roll_out,
        args=GRPOConfig(
            output_dir=str(folder),
            seed=seed,
            max_steps=steps,
            learning_rate=_LEARNING_RATE,
            lr_scheduler_type="constant",
            per_device_train_batch_size=_PROMPTS * _GENERATIONS,
            steps_per_generation=every,
            num_generations=_GENERATIONS,
            max_completion_length=task.MAX_COMPLETION_TOKENS,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        callbacks=[sync] if transfer == "deltasync" else [],
    )
    trainer.remove_callback(PrinterCallback)  # stdout is for the result
    if transfer == "deltasync":
        with deltasync.follow(generator, sync.config.channel, background=False) as following:
            trainer.train()
    else:
        trainer.train()
    return {
        "transfer": transfer,
        "every": every,
        "seed": seed,
        "rewards": [
            (each["step"] - 1, each["reward"]) for each in trainer.state.log_history if "reward" in each
        ],
        "bytes": [record.payload_bytes for record in sync.history[1:]],
        "parameters": trainer.model.num_parameters(),
        "sha256": digests(trainer.model.state_dict()),
    }


def _cut(tokens: list[int], end: int) -> list[int]:
    """Return the tokens up to the end of the answer."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def compare(runs: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Return for each interval the mean rewards, the bytes, and how many runs of both transfers are equal."""
    rows = []
    for every in EACH:
        ours, dense = (
            [run for run in runs if (run["transfer"], run["every"]) == (each, every)] for each in TRANSFERS
        )
        sizes = [size for run in ours for size in run["bytes"]]
        share = statistics.fmean(sizes) / (2 * ours[0]["parameters"])
        columns = zip(*([reward for _, reward in run["rewards"]] for run in ours), strict=True)
        rewards = [
            (step, statistics.fmean(each))
            for (step, _), each in zip(ours[0]["rewards"], columns, strict=True)
        ]
        row = {
            "every": every,
            "runs": len(ours),
            "equal_runs": sum(a["sha256"] == b["sha256"] for a, b in zip(ours, dense, strict=True)),
            "equal_curves": sum(a["rewards"] == b["rewards"] for a, b in zip(ours, dense, strict=True)),
            "rewards": rewards,
            "bytes_per_version": {"deltasync": statistics.fmean(sizes), "dense": 2 * ours[0]["parameters"]},
            "version_s": {"deltasync": DENSE_S * share, "dense": DENSE_S},
        }
        row["reached_s"] = {
            transfer: _reached_s(on_clock(row, transfer), max(1, WINDOW // every)) for transfer in TRANSFERS
        }
        rows.append(row)
    first = runs[0]
    return {
        "parameters": first["parameters"],
        "tensors": len(first["sha256"]),
        "steps": steps,
        "declared": {"step_s": STEP_S, "dense_s": DENSE_S, "reward": REACHED, "window": WINDOW},
        "every": rows,
        "equal": all(row["equal_runs"] == row["runs"] for row in rows),
    }


def _reached_s(curve: list[tuple[float, float]], points: int) -> float | None:
    """Return the seconds of the first reward that is high enough on average with those before it, `points` in
    all.
    """
    means = (
        (at, statistics.fmean(reward for _, reward in curve[end - points : end]))
        for end, (at, _) in enumerate(curve, 1)
        if end >= points
    )
    return next((at for at, mean in means if mean >= REACHED), None)


def on_clock(row: dict[str, Any], transfer: str) -> list[tuple[float, float]]:
    """Return rewards with the declared seconds at which the samples' weights were there; the first version
    was before.
    """
    version_s = row["version_s"][transfer]
    return [(step * STEP_S + step // row["every"] * version_s, reward) for step, reward in row["rewards"]]


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text."""
    rows = []
    for row in result["every"]:
        rewards = [reward for _, reward in row["rewards"]]
        took = (row["reached_s"][transfer] for transfer in TRANSFERS)
        sizes = (f"{size / 1e3:,.0f} kB" for size in row["bytes_per_version"].values())
        equal = f"{row['equal_runs']} of {row['runs']}"
        ends = f"{rewards[0]:.2f} / {rewards[-1]:.2f}"
        rows.append(
            (
                EACH[row["every"]],
                equal,
                ends,
                *sizes,
                *("not" if at is None else f"{at / 60:.1f} min" for at in took),
            )
        )
    reached = f"reward {result['declared']['reward']} after"
    columns = (
        "parameters equal to dense",
        "reward, first / last",
        *(f"{each}, a version" for each in TRANSFERS),
    )
    yield from common.table(("a version", *columns, *(f"{each}: {reached}" for each in TRANSFERS)), rows)
    declared = result["declared"]
    yield (
        f"{result['parameters']:,} parameters, {result['steps']} steps of GRPO; times by declared costs: "
        f"{declared['step_s']:g} s a step, {declared['dense_s']:.1f} s a dense version, a delta by its share "
        "of the bytes"
    )


def plot(result: dict[str, Any]) -> None:
    """Plot reward over steps, and over declared time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for row, color in zip(result["every"], ("tab:blue", "tab:green", "tab:red"), strict=True):
        style = {"color": color, "marker": "o", "markersize": 3, "linewidth": 1.2}
        by_step.plot(*zip(*row["rewards"], strict=True), label=f"a version {EACH[row['every']]}", **style)
        for transfer, line in zip(TRANSFERS, ("-", "--"), strict=True):
            seconds, rewards = zip(*on_clock(row, transfer), strict=True)
            label = f"{transfer}, {EACH[row['every']]}"
            by_time.plot([each / 60 for each in seconds], rewards, linestyle=line, label=label, **style)
    by_step.set_title("the same curve by deltasync and by dense copies, bit for bit", fontsize=10)
    by_step.set_xlabel("optimizer step")
    by_step.set_ylabel("reward")
    by_time.set_title(f"declared: {STEP_S:g} s a step, {DENSE_S:.0f} s a dense version", fontsize=10)
    by_time.set_xlabel("minutes by declared costs")
    for axis in (by_step, by_time):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(PLOT, dpi=110)
    pyplot.close(figure)


def main(folder: Path, steps: int, seeds: int) -> dict[str, Any]:
    """Measure and plot."""
    result = measure(folder.resolve(), steps, seeds)
    if not result["equal"]:
        common.say("deltasync and dense copies ended with other parameters.")
        sys.exit(1)
    plot(result)
    return result


if __name__ == "__main__":
    common.command(
        __doc__,
        main,
        lines,
        common.option("folder", type=Path, help="directory for the model and the runs"),
        common.option(
            "--steps", type=int, default=65, help="optimizer steps of a run, one more than a multiple of 16"
        ),
        common.option("--seeds", type=int, default=3, help="runs of each kind"),
    )
