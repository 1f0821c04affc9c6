"""The dashboard's picture in README and docs, of a real channel of a tiny model; the replicas' heartbeats are
made up.

python -m tests.pictures docs/images/dashboard.png
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from deltasync import Publisher, Retention, open_store
from deltasync.channel import keys
from deltasync.ops.dashboard import ChannelObserver, page
from deltasync.serve import heartbeat
from deltasync.serve.heartbeat import Heartbeat
from tests.browser import browse

LAYERS, VERSIONS, SHOWN = 12, 60, "s3://bucket/run"
ERROR = (
    f"{SHOWN}/parts/0000000042.000001-9f8e7d6c.0/000-00001.safetensors: the store answered 403 Forbidden. "
    "Check the "
    "credentials, and that they may list the bucket and get, put and delete objects in it."
)


def weights() -> dict[str, torch.Tensor]:
    """A model of 600,000 elements."""
    random = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (180, 128)}
    shapes |= {
        f"model.layers.{layer}.{part}.weight": (120, 128)
        for layer in range(LAYERS)
        for part in ("attn", "mlp", "up")
    }
    shapes |= {"model.norm.weight": (128,), "lm_head.weight": (180, 128)}
    return {name: torch.randn(shape, generator=random).to(torch.bfloat16) for name, shape in shapes.items()}


def step(model: dict[str, torch.Tensor], version: int, random: torch.Generator) -> None:
    """Change some elements of each tensor, some more than others."""
    for place, tensor in enumerate(model.values()):
        share = (
            0.008 * (1.2 + math.sin(version / 9)) * (0.4 + 0.04 * place + 0.3 * math.sin(place + version / 6))
        )
        mask = torch.rand(tensor.shape, generator=random) < max(share, 0.0002)
        tensor.view(torch.int16).add_(
            mask * torch.randint(-2, 3, tensor.shape, generator=random, dtype=torch.int16)
        )


def main(out: Path) -> None:
    """Publish, watch, and take the picture."""
    model, random = weights(), torch.Generator().manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"file://{folder}/run")
        observer = ChannelObserver(store, heat=VERSIONS)

        def beat(
            name: str,
            version: int | None,
            state: str = "serving",
            error: str | None = None,
            age_s: float = 0.0,
        ) -> None:
            told = Heartbeat(
                replica_id=name,
                run_id=publisher.run_id,
                version=version,
                state=state,
                error=error,
                time_s=time.time() - age_s,
            )
            heartbeat.write(store, told)

        with Publisher(store, anchor_every=15, retention=Retention(compact_every=5)) as publisher:
            for version in range(1, VERSIONS + 1):
                publisher.publish(model.items(), step=4 * version).wait(60)
                step(model, version, random)
                for name, wait_s, last in (
                    ("gpu-east-0", 0.2, 60),
                    ("gpu-east-1", 0.15, 59),
                    ("gpu-west-0", 0.3, 55),
                ):
                    time.sleep(wait_s * (0.8 + 0.4 * torch.rand(1, generator=random).item()))
                    beat(name, min(version, last))
                    observer.refresh()
            beat("fresh", None, "waiting")
            beat("gpu-west-0", 55, "staging")
            beat("gpu-west-1", 41, "failed", ERROR)
            beat("laptop", 23, age_s=2400)
            silent_s = time.time() - 2400  # a replica is live by the time at which its heartbeat was stored
            os.utime(f"{folder}/run/{keys.REPLICAS}laptop.json", (silent_s, silent_s))
        observer.refresh()
        observer.read_headers(VERSIONS)
        document = page(observer.snapshot()).replace(store.url.encode(), SHOWN.encode())
        (Path(folder) / "page.html").write_bytes(document)
        address, profile = (Path(folder) / "page.html").as_uri(), Path(folder) / "profile"
        browse(address, profile, f"--screenshot={out.absolute()}", width=1080, height=1432)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
