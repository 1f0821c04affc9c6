"""Training through an outage of the store: throughput while it is down, and all bits afterwards.

    python -m benchmarks.outage [--seconds 120] [--json]

from the root of the repository, with the development dependencies. Needs no GPU. A transformers.Trainer
publishes every step to an S3 server (moto, in this process) through a proxy that answers 503 during the
middle half of the time. The same training without an outage runs first, for comparison. Exits with 1 if the
outage costs more than 5 % of the throughput, or a published bit is wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks import common
from benchmarks.common import table
from benchmarks.models import digest
from deltasync import Replica
from demo import model as demo_model
from demo.processes import Child, interrupt_on_sigterm
from tests.http_faults import FaultProxy, status
from tests.servers.s3 import KEYS, MotoServer
from trl_callback import DeltaSyncCallback, gather


def main() -> None:
    """Run the benchmark by the command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="length of each training")
    parser.add_argument("--channel", help="used by the benchmark itself")
    parser.add_argument("--steps-file", type=Path, help="used by the benchmark itself")
    given = parser.parse_args()
    if given.channel is not None:
        train(given.channel, given.steps_file, given.seconds)
        return
    interrupt_on_sigterm()
    os.environ.update(KEYS)
    with contextlib.closing(MotoServer()) as server, FaultProxy(server.endpoint) as proxy:
        calm = run(server, proxy, given.seconds, outage=False)
        stormy = run(server, proxy, given.seconds, outage=True)
    ratio = stormy["middle_rate"] / calm["middle_rate"]
    result = {"seconds": given.seconds, "up": calm, "down": stormy, "ratio": ratio}
    common.emit(given.json, result, lines(result))
    if ratio < 0.95 or not (calm["equal"] and stormy["equal"]):
        sys.exit(1)


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result as lines of text."""
    rows = []
    for name, key in (
        ("up all the time", "up"),
        (f"down for {result['seconds'] / 2:.0f} s in the middle", "down"),
    ):
        found = result[key]
        bits = "equal" if found["equal"] else "WRONG"
        rates = (f"{found['rate']:.2f}", f"{found['middle_rate']:.2f}")
        rows.append((name, *rates, found["versions"], found["coalesced"], bits))
    columns = (
        "steps/s",
        "steps/s in the middle half",
        "versions",
        "published in the largest",
        "bits of every version",
    )
    yield from table(("store", *columns), rows)
    yield f"{result['up']['elements']:,} weights, every step published"
    yield f"throughput while the store is down: {result['ratio']:.1%} of that with it up"


def run(server: MotoServer, proxy: FaultProxy, seconds: float, *, outage: bool) -> dict[str, Any]:
    """Run one training in a process of its own, and check its versions; an outage is timed from the first
    step.
    """
    url = server.url(server.new_bucket(), endpoint=proxy.url)
    with tempfile.TemporaryDirectory() as folder:
        steps_file = Path(folder) / "steps.jsonl"
        command = [sys.executable, "-m", "benchmarks.outage", "--channel", url, "--seconds", str(seconds)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "CI": "1"}
        command += ["--steps-file", str(steps_file)]
        with Child("The training", command, environ, Path(folder) / "log") as child:
            child.wait_until(steps_file.exists, 600, "to begin")
            time.sleep(seconds / 4)
            if outage:
                proxy.strike(status(503), times=1 << 30)
            time.sleep(seconds / 2)
            proxy.heal()
            child.wait()
            child.check()
        lines = [json.loads(line) for line in steps_file.read_text().splitlines()]
    steps, history = lines[:-1], lines[-1]["history"]
    began = steps[0]["time_s"]
    middle = [step for step in steps if seconds / 4 <= step["time_s"] - began < 3 * seconds / 4]
    sha256 = {step["step"]: step["sha256"] for step in steps}
    replica = Replica(url)
    equal = True
    for record in history[1:]:  # the first version was published before the first step
        replica.sync(record["version"])
        equal = equal and digest(replica.state_dict()) == sha256[record["step"]]
    return {
        "rate": len(steps) / (steps[-1]["time_s"] - began),
        "middle_rate": len(middle) / (seconds / 2),
        "versions": len(history),
        "coalesced": max(record["coalesced"] for record in history),
        "elements": history[0]["total"],
        "equal": equal,
    }


class Steps(TrainerCallback):
    """Writes when each step ended and the weights' digest to a file; ends the training after a time."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds
        self._ends_s: float | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Write a line for the step."""
        now = time.monotonic()
        if self._ends_s is None:
            self._ends_s = now + self._seconds
        line = {
            "step": state.global_step,
            "time_s": now,
            "sha256": digest({name: tensor.to(torch.bfloat16) for name, tensor in gather.stream_of(model)}),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        control.should_training_stop = now >= self._ends_s


def train(channel: str, steps_file: Path, seconds: float) -> None:
    """Train a small model on noise, and publish every step."""
    torch.manual_seed(0)
    tokenizer = demo_model.build_tokenizer()
    rows = torch.randint(0, 64, (512, 64))
    sync = DeltaSyncCallback(channel)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=demo_model.build_model(tokenizer),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=1_000_000,
                per_device_train_batch_size=32,  # a step is longer than its upload, as in training
                learning_rate=1e-6,
                use_cpu=True,
                logging_steps=50,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[Steps(steps_file, seconds), sync],
        )
        trainer.train()
    history = [
        {"version": r.version, "step": r.step, "total": r.total, "coalesced": r.coalesced}
        for r in sync.history
    ]
    with steps_file.open("a") as file:
        file.write(json.dumps({"history": history}) + "\n")


if __name__ == "__main__":
    common.run(main)
