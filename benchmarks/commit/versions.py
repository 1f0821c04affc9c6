"""The versions that `benchmarks.commit` commits: a Qwen3 with random weights, and a channel whose versions
change 1 % of it.

All versions are published beforehand, and their records are put aside. A record is put back to let its
version arrive, so that no work of the publisher is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.common import say
from benchmarks.models import change, digests
from deltasync import Publisher
from deltasync.channel import keys
from deltasync.stores import open_store

SIZES = ("0.6b", "tiny", "82m", "experts")

_MAX_POSITIONS = 2048

_SHAPES = {
    "0.6b": {  # of Qwen/Qwen3-0.6B
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "82m": {
        "vocab_size": 1024,
        "hidden_size": 1024,
        "intermediate_size": 2304,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "experts": {
        "vocab_size": 1024,
        "hidden_size": 512,
        "moe_intermediate_size": 384,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Versions:
    """A checkpoint and a channel whose first version it is.

    Attributes:
        element_count, tensor_count: Size of the model.
    """

    checkpoint: Path  # directory of the checkpoint
    channel: str  # URL of the channel
    run_id: str  # run of the channel
    published: dict[int, str]  # digests of the versions, by number
    records: tuple[Path, ...]  # files of the records, from version 1 on, where readers find them
    # digests of each tensor's bits, at version 1, at version 2 and at the last one
    sha256: dict[int, dict[str, str]]
    element_count: int
    tensor_count: int
    changed: int  # number of elements that version 2 changes
    payload_bytes: int  # size of the delta of version 2

    def show(self, version: int) -> None:
        """Make this version the channel's newest."""
        for number, record in enumerate(self.records, 1):
            aside = self.checkpoint.parent / f"{number}.record"
            if number <= version and aside.exists():
                aside.rename(record)
            elif number > version and record.exists():
                record.rename(aside)


def prepare(size: str, folder: Path, changes: Sequence[float]) -> Versions:
    """Build a checkpoint of one of `SIZES` in a new folder, and publish its versions: the first, and one for
    each changed fraction.
    """
    checkpoint, channel = folder / "model", f"file://{folder / 'channel'}"
    folder.mkdir()
    say(f"building a Qwen3 of random weights ({size})")
    build_checkpoint(size, checkpoint)
    weights = load_file(checkpoint / "model.safetensors")
    say(f"publishing {len(changes) + 1} versions")
    sha256: dict[int, dict[str, str]] = {}
    # One anchor: it would be in the way of the deltas that are measured.
    with Publisher(channel, codec="packed", dtype="bfloat16", anchor_every=1 << 30) as publisher:
        receipt = publisher.publish(weights.items()).wait()
        for version, fraction in enumerate([0.0, *changes], 1):
            if version > 1:
                change(weights, fraction, seed=version)
                receipt = publisher.publish(weights.items()).wait()
            if version == 2:
                second = receipt
            if version in (1, 2, len(changes) + 1):
                sha256[version] = digests(weights)
        assert publisher.run_id is not None
        published = dict(publisher.published)
    store = open_store(channel)
    store.delete(keys.HEAD)  # it names versions that have not arrived
    slots = sorted(slot for info in store.list(keys.VERSIONS) if (slot := keys.slot_of(info.key)) is not None)
    return Versions(
        checkpoint=checkpoint,
        channel=channel,
        run_id=publisher.run_id,
        published=published,
        records=tuple(folder / "channel" / slot.key for slot in slots),
        sha256=sha256,
        element_count=sum(tensor.numel() for tensor in weights.values()),
        tensor_count=len(weights),
        changed=second.changed,
        payload_bytes=second.payload_bytes,
    )


def build_checkpoint(size: str, out: Path) -> None:
    """Write a bfloat16 checkpoint of random weights with a tokenizer, without a network."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
    from transformers.utils import logging

    from demo import model as demo_model

    logging.disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = demo_model.build_tokenizer()
    if size == "tiny":
        model = demo_model.build_model(tokenizer).to(torch.bfloat16)
    else:
        kind: Any = Qwen3MoeConfig if size == "experts" else Qwen3Config
        config = kind(
            **_SHAPES[size],
            max_position_embeddings=_MAX_POSITIONS,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            dtype=torch.bfloat16,
        )
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
