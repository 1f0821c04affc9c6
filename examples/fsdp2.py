"""A training loop of your own, sharded by FSDP2: every rank publishes the shards that it holds, without a
gather.

    torchrun --nproc-per-node 8 examples/fsdp2.py --model Qwen/Qwen3-0.6B --channel s3://bucket/run
    deltasync serve Qwen/Qwen3-0.6B --channel s3://bucket/run

Without a GPU:

    python examples/tiny_model.py /tmp/tiny
    torchrun --nproc-per-node 2 examples/fsdp2.py --model /tmp/tiny --channel file:///tmp/run
    deltasync log file:///tmp/run

With transformers' or TRL's trainers, `DeltaSyncCallback` does all of this.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from deltasync import Publisher


def main() -> None:
    """Train on random tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--channel", required=True)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    beside = options.model if Path(options.model).is_dir() else None  # config and tokenizer, for full weights
    publisher = Publisher(options.channel, group=dist.group.WORLD, model_files=beside)
    publisher.publish(model, step=0)
    torch.manual_seed(dist.get_rank())
    for step in range(1, options.steps + 1):
        ids = torch.randint(model.config.vocab_size, (2, 64), device=model.device)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # an evaluation leaves some parameters gathered; publish(model) reads the shards all the same
        with torch.no_grad():
            model(ids)
        receipt = publisher.publish(model, step=step)
        if dist.get_rank() == 0:
            print(
                f"version {receipt.version}: {receipt.changed:,} elements changed, {receipt.payload_bytes:,} "
                "bytes"
            )
    publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
