"""What each rank of a transformers Trainer does in `test_sharded`: torchrun --nproc-per-node N trainer_ranks.py FOLDER"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments

from trl_callback import DeltaSyncCallback

FOLDER = Path(sys.argv[1])


def let_accelerate_shard_on_cpu() -> None:
    """accelerate prepares FSDP on accelerators only, although nothing else in its FSDP2 needs one."""
    original = AcceleratorState.__init__

    def init(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init


class Expected(TrainerCallback):
    """Saves the whole weights, gathered, after what the callback before it has published."""

    def __init__(self, sync: DeltaSyncCallback, folder: Path) -> None:
        self.sync, self.folder = sync, folder

    def save(self, model: Any) -> None:
        whole = {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).to(torch.bfloat16, copy=True)
            for name, value in model.state_dict().items()
        }
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(whole, self.folder / f"{self.sync.history[-1].version}.pt")

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.save(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 3:
            self.save(model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.save(model)


def train(kind: str, **arguments: Any) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = Qwen3Config(vocab_size=601, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **shape)
    ids = torch.randint(config.vocab_size, (16, 8))
    args = TrainingArguments(
        output_dir=str(FOLDER / "out"),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-4,
        use_cpu=True,
        bf16=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        eval_strategy="steps",  # which gathers parameters, also before the final weights are published
        eval_steps=4,
        **arguments,
    )
    sync = DeltaSyncCallback(f"file://{FOLDER}/{kind}/channel", publish_steps=3)
    trainer = Trainer(
        model=Qwen3ForCausalLM(config),
        args=args,
        train_dataset=(rows := [{"input_ids": row, "labels": row} for row in ids]),
        eval_dataset=rows[:4],
        callbacks=[sync, Expected(sync, FOLDER / kind / "expected")],
    )
    trainer.train()
    told = {"history": [[record.version, record.step, record.kind, record.changed] for record in sync.history]}
    sharded = [name for name, param in trainer.model.named_parameters() if isinstance(param, DTensor)]
    (FOLDER / kind / f"told.{dist.get_rank()}.json").write_text(json.dumps(told | {"sharded": len(sharded)}))
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train("ddp")
    let_accelerate_shard_on_cpu()
    AcceleratorState._reset_state()
    wrapped = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}
    train("fsdp2", fsdp=True, fsdp_config={"version": 2, **wrapped})
    train("checkpointed", fsdp=True, fsdp_config={"version": 2, "activation_checkpointing": True, **wrapped})
    dist.destroy_process_group()
