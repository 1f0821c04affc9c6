"""Two ranks, of which the second dies while it uploads: dying_rank.py CHANNEL RANK, not by torchrun, which
ends both.
"""

from __future__ import annotations

import os
import sys
import threading

import torch
import torch.distributed as dist

from deltasync import Publisher, open_store
from deltasync.errors import PublishError
from deltasync.trainer.stream import TensorRange
from tests.faults import FaultyStore

if __name__ == "__main__":
    folder, rank = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=2)
    store = FaultyStore(open_store(f"file://{folder}"))
    publisher = Publisher(store, group=dist.group.WORLD, peer_timeout_s=5)
    weights = torch.zeros(1000)

    def stream() -> list[tuple[str, TensorRange]]:
        return [("w", TensorRange(weights[500 * rank : 500 * rank + 500], 500 * rank, (1000,)))]

    publisher.publish(stream(), step=0).wait(60)
    weights += 1
    if rank == 1:
        gate = store.hold_at("put", "parts/")
        threading.Thread(target=lambda: gate.entered.wait(60) and os._exit(9), daemon=True).start()
    receipt = publisher.publish(stream(), step=0)
    try:
        receipt.wait(60)
    except PublishError:
        print("lost version", receipt.version)
    for told in ("no publish without rank 1", "still no publish"):
        try:
            publisher.publish(stream(), step=0)
        except PublishError:
            print(told)
    try:
        publisher.close()
    except PublishError:
        print("closed")
