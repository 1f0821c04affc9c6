"""What each rank of a transformers Trainer does in `test_sharded_trainer`:

torchrun --nproc-per-node N trainer_ranks.py FOLDER KIND...
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from deltasync.errors import ConfigError
from tests.integration.trainers import tiny_moe
from tests.traffic import Traffic
from trl_callback import DeltaSyncCallback, gather
from trl_callback.gather import as_saved

FOLDER = Path(sys.argv[1])
TRAFFIC = Traffic()


def let_accelerate_shard_on_cpu() -> None:
    """accelerate prepares FSDP on accelerators only, although nothing else in its FSDP2 needs one."""
    original = AcceleratorState.__init__

    def init(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            # as it does there
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init


def whole(value: torch.Tensor) -> torch.Tensor:
    """A copy of all of it, gathered; on all ranks."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if not hasattr(value, "ds_id"):
        return value.detach().clone()
    import deepspeed

    with deepspeed.zero.GatheredParameters([value]):
        return value.detach().clone()


class Expected(TrainerCallback):
    """Saves the whole weights, gathered, after what the callback before it has published."""

    def __init__(self, sync: DeltaSyncCallback, folder: Path) -> None:
        self.sync, self.folder = sync, folder

    def save(self, model: Any) -> None:
        gathered = {name: whole(value) for name, value in model.state_dict(keep_vars=True).items()}
        if dist.get_rank() == 0:
            self.sync.weight_transfer.publisher.flush()  # or the next publish may join this one
            self.folder.mkdir(parents=True, exist_ok=True)
            if hasattr(model, "peft_config"):
                saved = get_peft_model_state_dict(model, gathered, save_embedding_layers=False)
            else:
                saved = {name: value.to(torch.bfloat16) for name, value in as_saved(model, gathered).items()}
            torch.save(saved, self.folder / f"{self.sync.weight_transfer.publisher.version}.pt")

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.save(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 3:
            self.save(model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.save(model)


def tiny() -> Qwen3ForCausalLM:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = Qwen3Config(
        vocab_size=601, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, **shape
    )
    return Qwen3ForCausalLM(config)


def tiny_lora() -> Any:
    """With DoRA's magnitudes, a module that is trained whole, and ranks that the processes cannot share
    equally.
    """
    lora = LoraConfig(
        r=3,
        use_dora=True,
        use_rslora=True,
        rank_pattern={"down_proj": 5},
        target_modules=["q_proj", "down_proj"],
        modules_to_save=["norm"],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(tiny(), lora)


def tiny_qlora() -> Any:
    """Over weights that bitsandbytes packs into elements of bfloat16, which FSDP2 can shard."""
    folder = FOLDER / "unpacked"
    if dist.get_rank() == 0:
        tiny().to(torch.bfloat16).save_pretrained(folder)
    dist.barrier()
    packing = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=packing, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    return get_peft_model(model, LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))


def train(kind: str, make_model: Callable[[], Any] = tiny, **arguments: Any) -> None:
    AcceleratorState._reset_state()
    torch.manual_seed(0)
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
        # an evaluation gathers parameters, also before the final weights are published
        **{"eval_strategy": "steps", "eval_steps": 4} | arguments,
    )
    model = make_model()
    ids = torch.randint(model.config.vocab_size, (16, 8))
    adapter: dict[str, Any] = {"adapter_only": True, "served_dtype": "keep"}
    sync = DeltaSyncCallback(
        f"file://{FOLDER}/{kind}/channel", publish_steps=3, **adapter if hasattr(model, "peft_config") else {}
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=(rows := [{"input_ids": row, "labels": row} for row in ids]),
        eval_dataset=rows[:4],
        callbacks=[sync, Expected(sync, FOLDER / kind / "expected")],
    )
    before = TRAFFIC.moved_bytes
    trainer.train()
    told = {
        "history": [[record.version, record.step, record.kind, record.changed] for record in sync.history]
    }
    told["sharded"] = gather.is_sharded(trainer.model)
    told["moved_bytes"] = TRAFFIC.moved_bytes - before
    if sync.config.adapter_only:
        torch.manual_seed(0)
        told["base"] = gather.adapter_base_of(tiny()).tensors
        trainer.save_model(str(FOLDER / kind / "saved"))
    (FOLDER / kind / f"told.{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    if kind == "zero3":
        next(trainer.model.parameters()).ds_tensor.ds_quant_scale = 1.0  # what quantized weights have
        try:
            gather.held_tensors(trainer.model)
        except ConfigError:
            return
        raise AssertionError("not refused")


class Begins(TrainerCallback):
    """Does something at one rank right before the channel is opened."""

    def __init__(self, rank: int, action: Callable[[torch.nn.Module], None]) -> None:
        self.rank, self.action = rank, action
        self.began_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if dist.get_rank() == self.rank:
            self.action(model)
        dist.barrier()
        self.began_s = time.monotonic()


def refused(
    kind: str, rank: int, action: Callable[[torch.nn.Module], None], words: str, **arguments: Any
) -> None:
    """What fails in one process before its publisher is there is told to all, by the rank's number."""
    AcceleratorState._reset_state()
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(FOLDER / "out"),
        max_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **arguments,
    )
    ids = torch.randint(601, (16, 8))
    begins, sync = Begins(rank, action), DeltaSyncCallback(f"file://{FOLDER}/{kind}/channel")
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(model=tiny(), args=args, train_dataset=rows, callbacks=[begins, sync])
    try:
        trainer.train()
    except ConfigError as error:
        assert words in str(error), (kind, error)
        assert dist.get_rank() == rank or re.search(rf"anks? (0 and )?{rank}", str(error)), (kind, error)
    else:
        raise AssertionError(f"{kind} is not refused")
    os.environ.pop("DELTASYNC_RETRIES", None)
    dist.barrier()


def no_variable(model: torch.nn.Module) -> None:
    os.environ["DELTASYNC_RETRIES"] = "many"


def other_weights(model: torch.nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).add_(1)


LAYERS = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"],
}
FSDP2 = {"version": 2, **LAYERS}
# Norms stay gathered between steps, other parameters do not.
ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "bf16": {"enabled": "auto"},
}
KINDS: dict[str, Callable[[], None]] = {
    "ddp": lambda: train("ddp"),
    "fsdp2": lambda: train("fsdp2", fsdp=True, fsdp_config=FSDP2),
    "checkpointed": lambda: train(
        "checkpointed", fsdp=True, fsdp_config=FSDP2 | {"activation_checkpointing": True}
    ),
    "refused": lambda: [  # type: ignore[dict-item, return-value]
        refused("alone", 0, no_variable, "DELTASYNC_RETRIES"),
        refused("differ", 1, other_weights, "differs between ranks 0 and 1"),
        refused("together", 1, no_variable, "DELTASYNC_RETRIES", bf16=True, fsdp=True, fsdp_config=FSDP2),
    ],
    "fsdp2-adapter": lambda: train("fsdp2-adapter", tiny_lora, fsdp=True, fsdp_config=FSDP2),
    "fsdp2-qlora": lambda: train("fsdp2-qlora", tiny_qlora, fsdp=True, fsdp_config=FSDP2, eval_strategy="no"),
    "zero3": lambda: train("zero3", deepspeed=ZERO3),
    "zero3-adapter": lambda: train("zero3-adapter", tiny_lora, deepspeed=ZERO3),
    "zero3-moe": lambda: train("zero3-moe", tiny_moe, deepspeed=ZERO3),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[2:]:
        if chosen in ("fsdp2", "refused", "fsdp2-adapter", "fsdp2-qlora"):
            let_accelerate_shard_on_cpu()
        KINDS[chosen]()
    dist.destroy_process_group()
