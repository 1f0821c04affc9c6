"""`benchmarks.commit` inside vLLM: loads a checkpoint and measures commits into the live model, in a process
of its own.

    python -m benchmarks.commit.engine REQUEST.json RESULT.json

The request holds the arguments of `patch.measure` and `checkpoint`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(request_file: str, result_file: str) -> None:
    """Read the request, measure, write the result."""
    from vllm import LLM

    request = json.loads(Path(request_file).read_text())
    checkpoint = request.pop("checkpoint")
    engine = LLM(
        checkpoint, enforce_eager=True, max_model_len=256, max_num_seqs=2, enable_prefix_caching=False
    )

    from benchmarks.commit import patch

    (result,) = engine.apply_model(lambda model: patch.measure(model, **request))
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
