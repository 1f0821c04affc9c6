"""Write the fixture from a folder of runs: python -m tests.corpus.make FOLDER"""

from __future__ import annotations

import io
import json
import lzma
import re
import sys
from pathlib import Path

import numpy as np

from benchmarks.corpus import report, runs
from tests.corpus import FILE, RUNS, planed

ROWS = 192  # of the embeddings, one in so many is kept
KEPT = re.compile(r"layers\.15\.(mlp\.gate_proj|self_attn\.v_proj|\w*_layernorm)\.weight$")


def main(folder: Path) -> None:
    """Every step's positions lie behind those of the step before, so that one array of gaps holds a run."""
    found: dict[str, np.ndarray] = {}
    for run in runs.find(folder):
        name = report.name({"name": run.name, "learning_rate": run.facts.get("learning_rate")})
        if name not in RUNS:
            continue
        specs = run.specs()
        old_N, at, steps, shapes = np.empty(0, np.uint16), [], [], {}
        for number, state in enumerate(run.states(folder / runs.BASE), -1):
            parts = []
            for tensor, bits in runs.by_tensor(specs, state.bits_N).items():
                shape = specs[tensor].shape
                if tensor.endswith("embed_tokens.weight"):
                    parts.append(bits.reshape(shape)[::ROWS].reshape(-1))
                    shapes[tensor] = (len(range(0, shape[0], ROWS)), *shape[1:])
                elif KEPT.search(tensor):
                    parts.append(bits)
                    shapes[tensor] = shape
            new_N = np.concatenate(parts)
            if number < 0:
                found["start"] = planed(new_N)
            else:
                at_K = np.flatnonzero(old_N != new_N)
                at.append(at_K + number * new_N.size)
                steps.append(new_N[at_K] - old_N[at_K])
            old_N = new_N
        gap_K, step_K = np.diff(np.concatenate(at), prepend=-1) - 1, np.concatenate(steps)
        if gap_K.max() >= 1 << 16:
            raise ValueError("a gap does not fit into 16 bits")
        found[f"{name} gaps"] = planed(gap_K.astype(np.uint16))
        found[f"{name} steps"] = planed(step_K << 1 ^ (step_K.view(np.int16) >> 15).view(np.uint16))
        found["shapes"] = np.frombuffer(json.dumps(shapes).encode(), np.uint8)
    file = io.BytesIO()
    np.savez(file, **found)
    FILE.write_bytes(lzma.compress(file.getvalue(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
