"""The walk of docs/quickstart.md: its programs and commands in empty folders, as they are printed.

    python -m tests.docs.walk      # runs it, and writes what the commands print into the page

A `console` block has commands after `$ `, each followed by what it prints. A block of Python whose first line
is `# NAME.py` is saved as that file. What stays runs until the walk ends. `masked` takes out what differs from
run to run and from machine to machine: times, rates, digests, sizes, and where lines end. The ports that the
page prints are replaced by free ones, so that two walks run side by side.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from demo.processes import Child
from demo.run import free_port
from tests.docs.pages import ROOT, Block, blocks

PAGE, SECTION = ROOT / "docs/quickstart.md", "A channel, in a minute"
_CHANGES = (
    r"[0-9a-f]{12}(?![0-9a-f])",  # digests, runs
    r"\d\d:\d\d:\d\d|\d{4}-\d\d-\d\d",
    r"\d[\d,]*\.\d+( (s|[kM]B)\b|%)?",
    r"\d[\d,]*( (ms|s|Mbit/s|kB|MB|bytes)\b| to (?=\d)|(?=\)))",
    r"(?<=replica )\S+(?=:)",
)


def masked(text: str) -> str:
    """Return the text without what changes, and without the widths of columns and lines."""
    text = " ".join(text.split())
    for pattern in _CHANGES:
        text = re.sub(pattern, "~", text)
    return text


def printed(block: Block) -> list[tuple[str, str]]:
    """The commands of a console block, each with the output that the page shows."""
    parts = re.split(r"(?m)^\$ (.*)\n", block.text)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def walk(folder: Path) -> Iterator[tuple[Block, list[tuple[str, str]]]]:
    """Run the section in this folder. Yields each console block with its commands and their real outputs."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DELTASYNC_")}
    environ = {**clean, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    environ["DELTASYNC_REPLICA_ID"] = "server-1"  # by default it is the host's name
    exports = ""
    section = [block for block in blocks(PAGE) if block.section == SECTION]
    ports = {
        port: str(free_port()) for block in section for port in re.findall(r"\b(?:5556|8001)\b", block.text)
    }
    with contextlib.ExitStack() as running:
        for block in section:
            text = _replaced(block.text, ports)
            if block.language == "python":
                (folder / block.note).write_text(text)
            elif block.language == "bash":
                command = ["bash", "-euc", f"cd {folder}\n{exports}{text}"]
                running.enter_context(Child(block.where, command, environ, folder / f"{block.line}.log"))
            else:
                outputs = []
                for shown, _ in printed(block):
                    command = _replaced(shown, ports)
                    exports += f"{command}\n" if command.startswith("export ") else ""
                    output = _output(f"{exports}{command}", folder, environ)
                    ends_s = time.monotonic() + 30
                    while "watch" in command and "serving" not in output and time.monotonic() < ends_s:
                        output = _output(f"{exports}{command}", folder, environ)  # heartbeats come later
                    outputs.append((shown, _replaced(output, {free: port for port, free in ports.items()})))
                yield block, outputs


def _replaced(text: str, ports: dict[str, str]) -> str:
    return re.sub(r"\b\d{4,5}\b", lambda found: ports.get(found[0], found[0]), text)


def _output(command: str, folder: Path, environ: dict[str, str]) -> str:
    shell = ["bash", "-euo", "pipefail", "-c", command]
    done = subprocess.run(
        shell,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return re.sub(r"(?m) +$", "", done.stdout)


def main() -> None:
    """Write what the commands print into the page."""
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for block, outputs in walk(Path(folder)):
            shown = "".join(f"$ {command}\n{output}" for command, output in outputs)
            text = text.replace(f"```console\n{block.text}", f"```console\n{shown}", 1)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
