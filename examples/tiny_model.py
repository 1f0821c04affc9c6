"""A tiny Qwen3 with its tokenizer, made here in a few seconds, to try the other examples without a GPU or a
download.

python examples/tiny_model.py /tmp/tiny
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Usage: python examples/tiny_model.py DIRECTORY")
    print("Importing transformers, which takes some seconds, and making the model ...", flush=True)
    from demo.model import build_checkpoint

    parameter_count, _ = build_checkpoint(Path(sys.argv[1]), seed=0)
    print(f"{parameter_count:,} parameters in {sys.argv[1]}")
