"""What `benchmarks.commit` measures on: a Qwen3 with random weights, and a channel of versions that change 1 % of it.

All versions are published beforehand, and their records are put aside. A record is put back to let its version arrive, so
that no work of the publisher is measured.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.common import say
from deltasync.channel import keys
from deltasync.publish import Publisher
from deltasync.stores import open_store
from deltasync.tensors.bits import bits_of

SIZES = ("0.6b", "tiny")

_MAX_STEP = 2  # ULP
_MAX_POSITIONS = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Versions:
    """A checkpoint and a channel whose first version it is.

    Attributes:
        checkpoint: Directory of the checkpoint.
        channel: URL of the channel.
        run_id: Run of the channel.
        published: Digests of the versions, by number.
        records: Files of the records, from version 1 on, where readers find them.
        sha256: Digests of each tensor's bits, at version 1, at version 2 and at the last one.
        element_count, tensor_count: Size of the model.
        changed: Number of elements that version 2 changes.
        payload_bytes: Size of the delta of version 2.
    """

    checkpoint: Path
    channel: str
    run_id: str
    published: dict[int, str]
    records: tuple[Path, ...]
    sha256: dict[int, dict[str, str]]
    element_count: int
    tensor_count: int
    changed: int
    payload_bytes: int

    def show(self, version: int) -> None:
        """Make this version the channel's newest."""
        for number, record in enumerate(self.records, 1):
            aside = self.checkpoint.parent / f"{number}.record"
            if number <= version and aside.exists():
                aside.rename(record)
            elif number > version and record.exists():
                record.rename(aside)


def prepare(size: str, folder: Path, changes: Sequence[float]) -> Versions:
    """Build a checkpoint and publish its versions.

    Args:
        size: One of `SIZES`.
        folder: Directory for it; must not exist.
        changes: The changed fraction of each version after the first.
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
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    from demo import model as demo_model

    logging.disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = demo_model.build_tokenizer()
    if size == "tiny":
        model = demo_model.build_model(tokenizer).to(torch.bfloat16)
    else:
        config = Qwen3Config(  # of Qwen/Qwen3-0.6B
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=_MAX_POSITIONS,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            dtype=torch.bfloat16,
        )
        model = Qwen3ForCausalLM._from_config(config)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def change(weights: dict[str, torch.Tensor], fraction: float, seed: int) -> None:
    """Move a fraction of the elements, at random positions of every tensor, by one or two ULP. Mutates `weights`."""
    if not fraction:
        return
    random = np.random.default_rng(seed)
    for tensor in weights.values():
        bits_N = bits_of(tensor)
        index_K = _positions(random, bits_N.size, fraction)
        step_K = random.integers(1, _MAX_STEP + 1, index_K.size, dtype=np.uint16)
        grows_K = random.integers(0, 2, index_K.size, dtype=np.uint16) > 0
        old_K = bits_N[index_K]
        grows_K |= old_K & 0x7FFF <= _MAX_STEP  # below zero lies NaN
        bits_N[index_K] = np.where(grows_K, old_K + step_K, old_K - step_K)


def _positions(random: np.random.Generator, element_count: int, fraction: float) -> np.ndarray:
    """Return ascending positions; each element has the same probability."""
    found = []
    last = -1
    while last < element_count:
        expected = fraction * (element_count - last)
        gap_K = random.geometric(fraction, int(expected + 4 * expected**0.5) + 16)
        found.append(last + np.cumsum(gap_K))
        last = int(found[-1][-1])
    index_K = np.concatenate(found)
    return index_K[index_K < element_count]


def digests(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return the sha256 of each tensor's bits."""
    return {name: hashlib.sha256(bits_of(tensor).data).hexdigest() for name, tensor in weights.items()}
