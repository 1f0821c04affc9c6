"""What the steps of real RL runs change, and the bits that every encoding of them needs.

    python -m benchmarks.corpus FOLDER [--base CHECKPOINT] [--json]

`benchmarks/corpus/runs.py` says what FOLDER holds, and `make corpus` makes one. Each bit of each version is
checked when it is read. Some minutes for 40 steps of a model of 135 M parameters on two cores, and 3 GB of
memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.corpus import report, runs, sizes
from benchmarks.corpus.changes import ULPS, Trace
from deltasync.errors import NotPublishedError


def measure(folder: Path, base: Path | None) -> dict[str, Any]:
    """Measure every run of a folder; of a run without a channel take what was logged."""
    found = [_measure_run(run, base or folder / runs.BASE) for run in runs.find(folder)]
    kept = {run["name"] for run in found}
    figures = [
        {"name": path.stem, **json.loads(path.read_text(encoding="utf-8"))}
        for path in sorted(folder.glob("*.json"))
        if path.stem not in kept
    ]
    return {"ulps": ULPS, "runs": found, "figures_only": [_summary(each) for each in figures]}


def _measure_run(run: runs.Run, base: Path) -> dict[str, Any]:
    specs = run.specs()
    states = run.states(base)
    first = next(states)
    trace, old_N = Trace(specs, first.bits_N), first.bits_N
    step_count = run.length()
    if step_count < 1:
        raise NotPublishedError(f"{run.url} holds one version only, so there is no step to measure.")
    wanted = sizes.spans(step_count)
    rewards = {each["step"]: each["reward"] for each in run.facts.get("steps", ())}
    kept: dict[int, np.ndarray] = {0: old_N}
    steps, spans = [], []
    for number, state in enumerate(states, 1):
        common.say(f"{run.name}: step {number} of {step_count}")
        history_N = trace.history() if (number - 1, number) in wanted else None
        kept[number] = state.bits_N
        for start, _ in (span for span in wanted if span[1] == number):
            given_N = history_N if start == number - 1 else None
            found = sizes.span_sizes(specs, kept[start], state.bits_N, given_N)
            spans.append({"first_step": start + 1, "last_step": number, **found})
        payload_bytes = sizes.step_sizes(specs, old_N, state.bits_N)
        counts = trace.add(state.bits_N)
        steps.append(
            {"step": state.step, **counts, "payload_bytes": payload_bytes, "reward": rewards.get(state.step)}
        )
        needed = {start for start, end in wanted if start <= number < end} | {number}
        kept = {at: bits_N for at, bits_N in kept.items() if at in needed}
        old_N = state.bits_N
    return {
        "name": run.name,
        "learning_rate": run.facts.get("learning_rate"),
        "task": run.facts.get("task"),
        "master": run.facts.get("master"),
        "tensors": len(specs),
        "elements": old_N.size,
        "total": trace.total(),
        "steps": steps,
        "spans": spans,
    }


def _summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return a run's figures: what its channel said of each step, and the rewards."""
    published = [each for each in found.get("versions", ()) if each["bits_per_changed"] is not None]
    rewards = {each["step"]: each["reward"] for each in found["steps"]}
    steps = [
        {
            "step": each["step"],
            "changed_fraction": each["changed_fraction"],
            "payload_bytes": {"context": each["delta_bytes"]},
            "bits_per_changed": each["bits_per_changed"],
            "reward": rewards.get(each["step"]),
        }
        for each in published
    ]
    return {"name": found["name"], "learning_rate": found["learning_rate"], "steps": steps}


if __name__ == "__main__":
    common.command(
        __doc__,
        measure,
        report.lines,
        common.option("folder", type=Path, help="the folder of the runs"),
        common.option(
            "--base", type=Path, help="the checkpoint that the runs start from; FOLDER/base by default"
        ),
    )
