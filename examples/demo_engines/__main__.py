"""One run that four engines follow at once, with equal bits: vLLM, SGLang, MLX and a torch module.

    make demo-engines
    python examples/demo_engines --out demo-engines-out     # the same, in the environment of make setup

TRL's AsyncGRPOTrainer trains a tiny Qwen3 and publishes 50 versions to a directory; its rollouts come from
vLLM. Each engine was started by its own command with untrained weights and the channel's URL. At several
versions the sha256 of each one's live tensors is compared with what the trainer wrote down; at the end each
answers a prompt as transformers does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deltasync.errors import DeltaSyncError
from demo.model import begin, save_checkpoint, warm_up
from demo.processes import Child, get_json, interrupt_on_sigterm
from demo.report import read_lines
from demo.run import Talker, cores, free_port, fresh
from demo_engines import report
from demo_engines.engines import ENGINES, ROOT, Engine

CATCH_UP_S = 60.0
PROOF_EVERY = 7  # versions between two digests of one engine's memory
WARMUP_STEPS = 60  # half of `make demo`'s: enough for rewards that differ
SAMPLES_PER_STEP = 16
CHECK_S = 0.5  # between two checks of all engines


class Running:
    """An engine that runs."""

    def __init__(self, engine: Engine, out: Path, stack: contextlib.ExitStack) -> None:
        self.engine, self.port = engine, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.proofs: list[dict[str, Any]] = []
        line, environ = engine.line(
            model=out / "untrained", channel=f"file://{out / 'channel'}", port=self.port, name=out / "model"
        )
        log = out / f"{engine.name.replace(' ', '-')}.log"
        self.child = stack.enter_context(
            Child(f"The server of {engine.name}", line, environ, log, cores()[engine.core])
        )

    def status(self, commits: int = 0) -> dict[str, Any] | None:
        """Its status, with its last commits; None while it does not answer."""
        try:
            found: dict[str, Any] | None = get_json(f"{self.url}/deltasync/status?commits={commits}")
        except DeltaSyncError:  # it is up, but cannot answer yet
            return None
        return found

    def prove(self) -> None:
        """Note the sha256 of its live tensors, and of which version it says that they are."""
        self.proofs.append(get_json(f"{self.url}/deltasync/digest"))

    def watch(self) -> bool:
        """Note them again if several versions have come since. Returns whether it answers."""
        self.child.check()
        status = self.status()
        if status is not None and status["state"] in ("failed", "refused"):
            raise DeltaSyncError(f"{self.engine.name} does not follow: {status['error']}")
        version = None if status is None else status["version"]
        if version is not None and (not self.proofs or version >= self.proofs[-1]["version"] + PROOF_EVERY):
            self.prove()
        return status is not None

    def serves(self, version: int) -> bool:
        """Whether it serves this version."""
        status = self.status()
        return status is not None and status["version"] == version

    def complete(self, prompt: str, out: Path) -> str:
        """Its greedy answer."""
        body: dict[str, Any] = {"prompt": prompt, "temperature": 0, "max_tokens": 32}
        if "{name}" in self.engine.command:
            body["model"] = str(out / "model")
        asked = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as reply:
            return json.load(reply)["choices"][0]["text"]


def run(out: Path, say: Talker, engines: list[Engine], versions: int, seed: int) -> dict[str, Any]:
    """Run the demo; return its summary."""
    began_s = time.monotonic()
    lesson, tokenizer, model = begin(seed, "counting")
    save_checkpoint(out / "untrained", model, tokenizer)
    with contextlib.ExitStack() as stack:
        running = [Running(engine, out, stack) for engine in engines]
        say(
            f"starting {', '.join(engine.name for engine in engines)}; they know only the channel "
            f"file://{out / 'channel'}"
        )
        torch.set_num_threads(1)
        loss = warm_up(model, tokenizer, seed, None, dataclasses.replace(lesson, warmup_steps=WARMUP_STEPS))
        save_checkpoint(out / "model", model, tokenizer)
        say(
            f"model ready after {WARMUP_STEPS} supervised steps: {model.num_parameters():,} parameters, loss "
            f"{loss:.3f}"
        )
        train = [sys.executable, "-m", "demo.train", "--model", f"{out}/model", "--seed", str(seed)]
        train += [
            "--channel",
            f"file://{out}/channel",
            "--server-url",
            running[0].url,
            "--steps",
            str(versions - 1),
        ]
        train += ["--samples", str(SAMPLES_PER_STEP), "--replicas", *(each.url for each in running)]
        train += ["--metrics", f"{out}/metrics.jsonl", "--published", f"{out}/published.jsonl"]
        # Each step waits until all of them serve the one before, so that none takes two versions at once.
        environ = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "CI": "1",
        }
        environ |= {"DELTASYNC_MAX_BEHIND": "0", "TRL_EXPERIMENTAL_SILENCE": "1"}
        trainer = stack.enter_context(Child("The trainer", train, environ, out / "trainer.log", cores()[1]))
        say(f"starting AsyncGRPOTrainer (log: {out / 'trainer.log'})")
        said, up = 0, set[str]()
        while trainer.running():
            time.sleep(CHECK_S)
            for each in running:
                if each.watch() and each.engine.name not in up:
                    up.add(each.engine.name)
                    say(f"{each.engine.name} is up")
            lines = list(read_lines(out / "metrics.jsonl"))
            if len(lines) >= said + 10:
                said = len(lines)
                say(f"step {said} of {versions - 1}  reward {lines[-1]['reward']:.3f}")
        trainer.check()
        last = max(line["version"] for line in read_lines(out / "published.jsonl"))
        statuses, answers = {}, {}
        for each in running:
            each.child.wait_until(lambda each=each: each.serves(last), CATCH_UP_S, f"to serve version {last}")
            each.prove()
            statuses[each.engine.name] = each.status(versions)
        say(f"training done; all of them serve version {last}")
        prompt = report.prompt(tokenizer)
        for each in running:
            answers[each.engine.name] = each.complete(prompt, out)
    expected = report.reference(out, tokenizer, prompt, answers)
    summary = report.summarize(
        out, {each.engine.name: each.proofs for each in running}, statuses, answers, expected, tokenizer
    )
    own = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = sum(each.ru_utime + each.ru_stime for each in own)
    return summary | {"wall_s": round(time.monotonic() - began_s, 1), "cpu_s": round(cpu_s, 1)}


def main() -> int:
    """Run, print the table, write `summary.json` and `run.png`; 9 if any bits differ, or tokens by more than
    rounding.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo-engines-out"), help="replaced; default: demo-engines-out"
    )
    parser.add_argument("--versions", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    others = [engine.name for engine in ENGINES[1:]]  # the first one makes the trainer's rollouts
    parser.add_argument(
        "--without", action="append", default=[], choices=others, help="an engine to leave out"
    )
    args = parser.parse_args()
    engines = [engine for engine in ENGINES if engine.name not in args.without]
    for engine in engines:
        if engine.missing is not None:
            sys.exit(
                f"{engine.name} cannot be run: {engine.missing}. To leave it out: --without '{engine.name}'"
            )
    out = fresh(args.out)
    interrupt_on_sigterm()
    began_s = time.monotonic()
    with Talker(
        lambda line: print(f"[{time.monotonic() - began_s:6.1f} s] {line}", file=sys.stderr, flush=True), 15.0
    ) as say:
        summary = run(out, say, engines, args.versions, args.seed)
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        report.plot(out, summary)
        say(f"written: {out / 'summary.json'} and {out / 'run.png'}")
    for row in report.table(summary):
        print(row)
    for name in args.without:
        print(f"{name} was left out.")
    return 0 if summary["equal"] else 9


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DeltaSyncError as error:
        sys.exit(f"demo: {error}")
