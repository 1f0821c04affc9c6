"""Look up what deltasync uses of vLLM in a vLLM's source, without importing it.

python -m tests.vllm_source FOLDER 0.33     FOLDER holds the package `vllm`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import griffe

from vllm_plugin import compat
from vllm_plugin.compat import Use


def source_arguments(folder: str) -> Callable[[Use], Sequence[str] | None]:
    def arguments_of(use: Use) -> Sequence[str] | None:
        place = Path(folder, *use.module.split("."))
        path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        found = griffe.visit(use.module, path, path.read_text("utf-8"))[use.name]
        return [parameter.name for parameter in found.parameters] if found.is_function else None

    return arguments_of


def main(folder: str, minor: str) -> int:
    """Say what is missing; 0 if nothing is."""
    wrong = compat.missing(compat.USES, minor, source_arguments(folder))
    print(
        "\n".join(f"changed: {use}" for use in wrong)
        or f"vLLM {minor}: all {len(compat.USES)} uses are there"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
