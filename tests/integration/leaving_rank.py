"""Two ranks, of which the second ends before it opens its publisher: leaving_rank.py HOW RANK.

HOW is `raises` or `exits`. The first rank prints what it is told, and after how many seconds.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import torch.distributed as dist

from deltasync import Publisher
from deltasync.errors import PublishError

if __name__ == "__main__":
    how, rank = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        if how == "raises":
            raise ValueError("no such file on this host")
        sys.exit(3)
    began_s = time.monotonic()
    try:
        Publisher(f"file://{tempfile.mkdtemp()}", group=dist.group.WORLD, peer_timeout_s=60)
    except PublishError as error:
        print(f"{time.monotonic() - began_s:.1f}", error)
