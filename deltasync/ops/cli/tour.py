"""`python -m deltasync`: two steps of a small model through a channel in a temporary folder, into a replica.

The trainer's part and the replica's run in one process here. Between machines the URL is the only difference.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Mapping

import torch

from deltasync import Publisher, Receipt, Replica, Retention
from deltasync.errors import ApplyError
from deltasync.ops.cli.output import echo

_LEARNING_RATE = 3e-7
_SHAPES = {"embed.weight": (8192, 512), "up.weight": (2048, 512), "down.weight": (512, 2048)}


def run() -> None:
    """Publish three versions, have a replica take each, and compare all of its bits with the trainer's.

    Raises:
        DeltaSyncError: the temporary folder cannot be used.
    """
    generator = torch.Generator().manual_seed(0)
    masters = {
        name: 0.02 * torch.randn(shape, generator=generator, device="cpu") for name, shape in _SHAPES.items()
    }
    with tempfile.TemporaryDirectory(prefix="deltasync-") as folder:
        echo(f"channel    file://{folder}")
        with Publisher(f"file://{folder}", retention=Retention(compact_every=0)) as publisher:
            replica = Replica(f"file://{folder}")
            for step in range(3):
                if step:
                    _update(masters, generator)
                weights = {name: master.bfloat16() for name, master in masters.items()}
                receipt = publisher.publish(weights, step=step).wait(timeout_s=60)
                echo(f"version {receipt.version}  trainer: {_sent(receipt)}")
                started = time.perf_counter()
                replica.sync()
                took_ms = 1e3 * (time.perf_counter() - started)
                if _sha256(replica.state_dict()) != _sha256(weights):
                    raise ApplyError(
                        "The replica's bits are not the trainer's: this is a fault of deltasync."
                    )
                echo(
                    f"           replica: {took_ms:.0f} ms later, all bits of {receipt.total:,} elements equal"
                )


def _update(masters: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
    """Move each float32 master by about the learning rate, as Adam does."""
    for master in masters.values():
        master.add_(torch.randn(master.shape, generator=generator, device="cpu"), alpha=_LEARNING_RATE)


def _sent(receipt: Receipt) -> str:
    if receipt.kind == "anchor":
        return f"full weights, {receipt.payload_bytes / 1e6:.1f} MB"
    changed = f"{receipt.changed:,} elements changed ({receipt.changed_fraction:.2%})"
    return f"{changed}, {receipt.payload_bytes / 1e3:.0f} kB, {receipt.bits_per_changed:.1f} bits a change"


def _sha256(weights: Mapping[str, torch.Tensor]) -> str:
    """Digest bits without any of deltasync's own digests."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
