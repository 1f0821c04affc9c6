"""A rank that publishes five versions and ends without close(): ending_ranks.py CHANNEL HOW RANK SIZE.

HOW is what is executed at the end. With `signalled` the rank publishes until SIGTERM comes; CHANNEL.RANK has
its last step.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from deltasync import Publisher
from deltasync.trainer.stream import TensorRange

if __name__ == "__main__":
    folder, how, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=size)
    publisher = Publisher(f"file://{folder}", group=dist.group.WORLD, peer_timeout_s=60, anchor_every=3)
    weights, last = torch.zeros(10 * size, 8), Path(f"{folder}.{rank}")
    for step in itertools.count(1) if how == "signalled" else range(1, 6):
        weights += 1
        held = weights[10 * rank : 10 * rank + 10]
        publisher.publish([("w", TensorRange(held, 80 * rank, (10 * size, 8)))], step=step)
        partly = Path(f"{last}.partly")
        partly.write_text(str(step))
        partly.replace(last)
    exec(how)
