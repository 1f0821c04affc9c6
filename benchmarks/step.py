"""The time that publishing adds to an optimizer step, compared with that of a copy of the weights.

    python -m benchmarks.step [--size 0.6b] [--changed 0.01] [--rounds 10] [--json]

Publishes a Qwen3 in bfloat16 with random weights, as `DeltaSyncCallback` does after each step. Before each
publish a fraction of its elements changes, as in an optimizer step. The upload to a directory runs in the
background; the wait for it before the next round is not measured.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import common
from benchmarks.commit.versions import SIZES, build_checkpoint
from benchmarks.common import table
from benchmarks.models import change
from deltasync import Replica
from deltasync.kernels import native
from trl_callback import DeltaSyncConfig, DeltaWeightTransfer, gather


def run(size: str, changed: float, rounds: int) -> dict[str, Any]:
    """Measure, and compare the last version's bits.

    Returns bytes of the weights and of the last delta, its changed elements and all elements; threads; median
    seconds of a copy of the weights, and those that publishing adds to a step; these seconds of each step.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_checkpoint(size, folder / "model")
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
        weights = dict(gather.stream_of(model))
        channel = f"file://{folder}/channel"
        transfer = DeltaWeightTransfer(DeltaSyncConfig(channel, anchor_every=1 << 30))
        transfer.bind(model)
        transfer.open()
        copies = {name: torch.empty_like(weight) for name, weight in weights.items()}
        publish_s, memcpy_s = [], []
        for number in range(rounds + 2):  # the first is an anchor, the second meets new memory
            if number:
                change(weights, changed, seed=number)
            before = time.perf_counter()
            transfer.publish(gather.stream_of(model))
            publish_s.append(time.perf_counter() - before)
            transfer.record(ack_s=None)
            transfer.flush()
            before = time.perf_counter()
            for name, weight in weights.items():
                copies[name].copy_(weight)
            memcpy_s.append(time.perf_counter() - before)
        transfer.destroy()
        replica = Replica(channel)
        replica.sync()
        published = replica.state_dict()
        assert all(
            torch.equal(published[name].view(torch.int16), weight.view(torch.int16))
            for name, weight in weights.items()
        )

    last = transfer.history[-1]
    copy_s, step_s = statistics.median(memcpy_s[2:]), statistics.median(publish_s[2:])
    return {
        "weight_bytes": sum(weight.nbytes for weight in weights.values()),
        "changed": last.changed,
        "total": last.total,
        "payload_bytes": last.payload_bytes,
        "threads": {"deltasync": native.threads(1 << 30), "torch": torch.get_num_threads()},
        "copy_s": copy_s,
        "step_s": step_s,
        "copies": step_s / copy_s,
        "steps_s": publish_s[2:],
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text. Each number may be a list, of the least and the most of several
    runs.
    """

    def span(name: str, factor: float, digits: int) -> str:
        found = result[name]
        return " to ".join(
            f"{factor * each:.{digits}f}" for each in (found if isinstance(found, list) else [found])
        )

    rows = (
        ("copy of the weights", span("copy_s", 1e3, 0), "1"),
        ("added to a step by publishing", span("step_s", 1e3, 0), span("copies", 1, 1)),
    )
    yield from table(
        (f"{result['weight_bytes'] / 1e9:.2f} GB of weights, 1 % changed", "ms", "copies"), rows, words=3
    )


if __name__ == "__main__":
    common.command(
        __doc__,
        run,
        lines,
        common.option(
            "--size", choices=SIZES, default="0.6b", help="model of the shape of Qwen3-0.6B, or the demo's"
        ),
        common.option(
            "--changed", type=float, default=0.01, help="fraction of the elements that a step changes"
        ),
        common.option("--rounds", type=int, default=10, help="steps to measure"),
    )
