"""CPU seconds of the first use in a new container: `python -m benchmarks.first_use`.

A process without any cache publishes five versions of a 512 x 512 model and follows two of them. Another one
only imports torch; the difference is what deltasync costs. Prints how long each publish held the trainer and
each sync took, too.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile

_USE = """
import json, sys, time
import torch
from deltasync import Publisher, Replica

def timed(action):
    began = time.perf_counter()
    result = action()
    return result, round(time.perf_counter() - began, 4)

weights, held, synced = {"w": torch.randn(512, 512).to(torch.bfloat16)}, [], []
with Publisher(f"file://{sys.argv[1]}/channel") as publisher:
    replica = None
    for step in range(5):
        receipt, seconds = timed(lambda: publisher.publish(weights.items()))
        held.append(seconds)
        receipt.wait(600)
        if step in (1, 4):
            replica = replica or Replica(f"file://{sys.argv[1]}/channel")
            synced.append(timed(replica.sync)[1])
        weights["w"].view(torch.int16)[torch.randint(512, (2000,)), torch.randint(512, (2000,))] += 1
print(json.dumps({"held_s": held, "synced_s": synced}))
"""


def _cpu_s(code: str) -> tuple[float, str]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        environ = {
            **os.environ,
            "HOME": folder,
            "XDG_CACHE_HOME": folder,
            "DELTASYNC_CACHE_DIR": f"{folder}/cache",
        }
        done = subprocess.run(
            [sys.executable, "-c", code, folder], env=environ, capture_output=True, text=True, check=True
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def main() -> None:
    """Print the figures."""
    torch_s = min(_cpu_s("import torch")[0] for _ in range(3))
    runs = [_cpu_s(_USE) for _ in range(3)]
    cpu_s, output = min(runs)
    print(
        json.dumps(
            {"torch_cpu_s": round(torch_s, 2), "beyond_torch_cpu_s": round(cpu_s - torch_s, 2)}
            | json.loads(output)
        )
    )


if __name__ == "__main__":
    main()
