"""What publishing adds to an optimizer step: `DeltaSyncCallback` after each step, beside a copy of the weights.

    python -m benchmarks.step [--size 0.6b] [--changed 0.01] [--rounds 10]

A Qwen3 of that shape in bfloat16 with random weights; between two publishes a fraction of its elements changes, as an
optimizer step would do. The upload goes to a directory in the background; it is waited for before the next round, outside of
what is measured.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numba
import torch
from transformers import AutoModelForCausalLM

from deltasync import Replica
from deltasync.bench import commit_data
from trl_callback import DeltaSyncConfig, DeltaWeightTransfer, gather


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=commit_data.SIZES, default="0.6b")
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), arguments.size, arguments.changed, arguments.rounds)


def run(folder: Path, size: str, changed: float, rounds: int) -> None:
    """Measure, print medians, and compare the last version's bits."""
    commit_data.build_checkpoint(size, folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    weights = gather.checkpoint_tensors(model)
    channel = f"file://{folder}/channel"
    transfer = DeltaWeightTransfer(DeltaSyncConfig(channel, anchor_every=1 << 30))
    transfer.bind(model)
    transfer.open()
    copies = {name: torch.empty_like(weight) for name, weight in weights.items()}
    publish_s, memcpy_s = [], []
    for number in range(rounds + 2):  # the first is an anchor, the second meets new memory
        if number:
            commit_data.change(weights, changed, seed=number)
        before = time.perf_counter()
        transfer.publish(gather.checkpoint_tensors(model).items())
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
    assert all(torch.equal(published[name].view(torch.int16), weight.view(torch.int16)) for name, weight in weights.items())

    size_bytes = sum(weight.nbytes for weight in weights.values())
    copy_s, step_s = statistics.median(memcpy_s[2:]), statistics.median(publish_s[2:])
    last = transfer.history[-1]
    print(
        f"{size_bytes / 1e9:.2f} GB, {last.changed:,} of {last.total:,} changed, payload {last.payload_bytes / 1e6:.2f} MB"
    )
    print(f"threads: {numba.get_num_threads()} in deltasync's kernels, {torch.get_num_threads()} in torch's copy")
    print(f"copy of the weights     {1e3 * copy_s:8.1f} ms")
    print(f"added to a step         {1e3 * step_s:8.1f} ms = {step_s / copy_s:.2f} times the copy")


if __name__ == "__main__":
    main()
