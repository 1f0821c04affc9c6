"""Weights that benchmarks publish: random ones in the shapes of Qwen3-0.6B, and versions that move a part of
them.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from deltasync import Publisher, Replica, open_store
from deltasync.tensors.bits import bits_of

Weights = dict[str, torch.Tensor]

_FULL_BYTES = 1.19e9
_MAX_STEP = 2  # ULP


def shapes(gigabytes: float = 1.19) -> dict[str, tuple[int, ...]]:
    """Return the shapes of Qwen3-0.6B's matrices; of fewer layers and a smaller vocabulary for less than 1.19
    GB.
    """
    share = gigabytes * 1e9 / _FULL_BYTES
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (round(151_936 * share), 1024)}
    for layer in range(max(1, round(28 * share))):
        start = f"model.layers.{layer}"
        for name, shape in (
            ("q", (2048, 1024)),
            ("k", (1024, 1024)),
            ("v", (1024, 1024)),
            ("o", (1024, 2048)),
        ):
            found[f"{start}.self_attn.{name}_proj.weight"] = shape
        for name, shape in (("gate", (3072, 1024)), ("up", (3072, 1024)), ("down", (1024, 3072))):
            found[f"{start}.mlp.{name}_proj.weight"] = shape
    return found


def model(gigabytes: float) -> Weights:
    """Return random bfloat16 weights of about this size."""
    random = torch.Generator().manual_seed(0)
    return {
        name: torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=random)
        for name, shape in shapes(gigabytes).items()
    }


def change(weights: Weights, fraction: float, seed: int) -> None:
    """Move a fraction of the elements, at random positions of every tensor, by one or two ULP. Mutates
    `weights`.
    """
    if not fraction:
        return
    random = np.random.default_rng(seed)
    for tensor in weights.values():
        bits_N = bits_of(tensor)
        index_K = _positions(random, bits_N.size, fraction)
        step_K = random.integers(1, _MAX_STEP + 1, index_K.size, dtype=np.uint16)
        grows_K = random.integers(0, 2, index_K.size, dtype=np.uint16) > 0
        old_K = bits_N[index_K]
        grows_K |= old_K & 0x7FFF <= _MAX_STEP  # below zero are NaNs
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


def digests(weights: Weights) -> dict[str, str]:
    """Return the sha256 of each tensor's bits."""
    return {name: hashlib.sha256(bits_of(tensor).data).hexdigest() for name, tensor in weights.items()}


def digest(weights: Weights) -> str:
    """Return the sha256 over all bits, in the order of names."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(bits_of(weights[name]).data)
    return found.hexdigest()


def warm_up() -> None:
    """Load the kernels: publish and follow two versions in memory."""
    store, weights = open_store("memory://warm"), model(0.05)
    with Publisher(store, dtype="keep") as publisher:
        publisher.publish(weights).wait(60)
        change(weights, 0.01, seed=1)
        publisher.publish(weights).wait(60)
    Replica(store).sync()
    store.delete(*[info.key for info in store.list("")])
