"""Any transformers.Trainer: publish every N steps, for whoever wants to follow, such as servers that
evaluate.

    python examples/trainer.py --model Qwen/Qwen3-0.6B --channel s3://bucket/run --publish_steps 10
    deltasync serve Qwen/Qwen3-0.6B --channel s3://bucket/run      # now, later, or never

The same on CPUs, with a tiny model and a channel in a folder, in half a minute:

    python examples/trainer.py --alone

All options of transformers' TrainingArguments and of DeltaSyncConfig are options here.
"""

from __future__ import annotations

import random

from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments

from demo import task
from demo.alone import ScriptArguments, alone
from trl_callback import DeltaSyncCallback, DeltaSyncConfig


def main() -> None:
    """Train on demonstrations of the demo's counting task."""
    parser = HfArgumentParser(
        (ScriptArguments, TrainingArguments, DeltaSyncConfig), description=__doc__.partition("\n\n")[0]
    )
    parser.set_defaults(
        output_dir="trainer-out", max_steps=20, learning_rate=1e-5, logging_steps=5, report_to="none"
    )
    script, training, channel = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(script.model, dtype="float32"),
        args=training,
        train_dataset=demonstrations(tokenizer, training.seed),
        processing_class=tokenizer,
        callbacks=[DeltaSyncCallback(channel)],
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)


def demonstrations(tokenizer: AutoTokenizer, seed: int) -> list[dict[str, list[int]]]:
    """Right answers as token ids; all of one length, so that no batch needs padding."""
    rng = random.Random(seed)
    rows = []
    for _ in range(256):
        start = rng.choice(task.FIRST_STARTS)
        turns = [
            {"role": "user", "content": task.prompt_text(start)},
            {"role": "assistant", "content": task.demonstration(start, rng)},
        ]
        rows.append(tokenizer.apply_chat_template(turns, return_dict=False))
    return [{"input_ids": row, "labels": row} for row in rows]


if __name__ == "__main__":
    with alone():
        main()
