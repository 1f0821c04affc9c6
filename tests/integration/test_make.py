"""The first command of each target of the Makefile starts: its help, one step, or the collection of its
tests.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / ".venv-services" / "python"
PHONY = re.findall(r"[\w-]+", re.findall(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0])
# What the first program of a target is called with here, instead of what the target says behind these words.
STARTS = {
    "demo": ("examples/demo", "--help"),
    "demo-engines": ("examples/demo_engines", "--help"),
    "demo-hosts": ("-m tests.hosts", "--help"),
    "test-faults": ("-m pytest tests/kills", "--collect-only -q"),
    "test-radosgw": ("-m tests.servers.radosgw", "--help"),
    "test-router": ("-m pytest tests/integration/test_router.py", "--collect-only -q"),
    "test-sglang": ("-m pytest tests/integration/test_sglang.py", "--collect-only -q"),
    "test-triton": ("-m pytest tests/property/test_gpu_compiled.py", "--collect-only -q"),
    "fuzz": ("-m tests.fuzz.run", None),  # below
    "simulate": ("-m tests.simulator", "--seeds 1 --steps 5"),
    "release-check": ("requirements/release.py", "--help"),
    "bench": ("-m benchmarks.codec", "--help"),
    "corpus": ("-m benchmarks.corpus.train", "--help"),
    "rivals": ("-m benchmarks.rivals", "--help"),
    "results": ("-m benchmarks.record", "--list"),
    "results-tables": ("-m benchmarks.results", "--check"),
}
# These have an environment of their own, or start nothing of this checkout.
ELSEWHERE = {"test-lowest", "test-mlx", "test-vllm", "test-newest", "test-ray", "lock", "audit", "dist"}
HERE = {
    "setup",
    "programs",
    "services",
    "test",
    "test-long",
    "test-peers",
    "check-vllm",
    "check",
    "format",
    "docs",
    "gpu-kit",
    "clean",
}


def planned(target: str) -> str:
    """Return the commands of a target, without those that set an environment up."""
    ready = [
        f"--old-file={name}"
        for name in ("setup", "services", "programs", *re.findall(r"\.venv[\w-]*/\.ready", target))
    ]
    command = ["make", "--dry-run", "--no-print-directory", *ready, target]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env=_environment()
    ).stdout


def _environment(*folders: Path) -> dict[str, str]:
    """Return what a shell has: pytest's own paths would hide that a command finds nothing."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MAKE"))}
    return environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def _started(command: Sequence[str], *folders: Path) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=_environment(*folders),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    skipped = "pytest" in command and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert done.returncode == 0 or skipped, done.stdout
    return done.stdout


def test_every_target_is_tried() -> None:
    assert {*PHONY} == {*STARTS} | ELSEWHERE | HERE


@pytest.mark.parametrize("target", [target for target, (_, words) in STARTS.items() if words is not None])
def test_the_first_command_starts(target: str) -> None:
    program, words = STARTS[target]
    lines = planned(target).splitlines()
    (ours, *_) = [line for line in lines if f" {program.removeprefix('-m pytest ')}" in line]
    names_path = re.search(r'PYTHONPATH="([^"$]*)', ours)
    folders = (
        [] if names_path is None else [Path(folder) for folder in names_path[1].split(os.pathsep) if folder]
    )
    _started([sys.executable, *program.split(), *(words or "").split()], *folders)


def test_a_reader_is_fuzzed(tmp_path: Path) -> None:
    if not (SERVICES / "atheris").is_dir():
        pytest.skip("no atheris in .venv-services; `make services` installs it")
    assert "tests.fuzz.run" in planned("fuzz")
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.fuzz", "small", str(tmp_path), "-runs=2"]
    assert "DONE" in _started(command, ROOT, ROOT / "examples", SERVICES)


def _required(names: Sequence[str]) -> Iterator[metadata.Distribution]:
    """Yield the distributions that are installed here of these requirements, and of what they require."""
    wanted, seen = [*map(Requirement, names)], set[tuple[str, ...]]()
    while wanted:
        requirement = wanted.pop()
        key = canonicalize_name(requirement.name), *sorted(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        with contextlib.suppress(metadata.PackageNotFoundError):  # such as MLX
            found = metadata.distribution(requirement.name)
            yield found
            extras = requirement.extras or {""}
            for needed in map(Requirement, found.requires or []):
                if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                    wanted.append(needed)


def _link(names: Sequence[str], site: Path) -> None:
    """Make a folder of what these requirements install, and nothing else that is here."""
    site.mkdir()
    for found in _required(names):
        for top in {
            file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")
        }:
            with contextlib.suppress(FileExistsError):  # folders that several share
                (site / top).symlink_to(Path(str(found.locate_file(top))))


def _installs(target: str) -> list[str]:
    """Return the requirements that the environment of a target is made of."""
    environment = re.findall(
        rf"^{target}:.*?(\.venv[\w-]+/\.ready)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )[0]
    commands = subprocess.run(
        ["make", "--dry-run", "--always-make", "--no-print-directory", environment],
        cwd=ROOT, capture_output=True, text=True, check=True, env=_environment(),
    ).stdout.replace("\\\n", " ")  # fmt: skip
    found = ["deltasync"]
    for line in commands.splitlines():
        if "pip install" in line and environment.partition("/")[0] + "/bin" in line:
            words = shlex.split(line.partition("pip install")[2])
            takes_a_value = {"--editable", "--constraint", "--index-url", "--target", "--requirement"}
            found += [
                word for before, word in zip(["", *words], words, strict=False)
                if not word.startswith("-") and before not in takes_a_value and "/" not in word and word != "pip"
            ]  # fmt: skip
    return found


# mlx-lm requires it
@pytest.mark.parametrize(("target", "beside"), [("test-lowest", []), ("test-mlx", ["transformers"])])
def test_tests_are_collected_with_what_the_target_installs(
    target: str, beside: list[str], tmp_path: Path
) -> None:
    _link([*_installs(target), *beside], tmp_path / "site")
    commands = [line for line in planned(target).replace("\\\n", " ").splitlines() if "bin/pytest" in line]
    assert commands
    for line in commands:
        files = subprocess.run(
            ["sh", "-c", f"printf '%s ' {line.partition('bin/pytest')[2]}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        quick = "--assert=plain", "-p", "no:hypothesispytest"  # what these prepare would not run
        command = [sys.executable, "-S", "-m", "pytest", *files, "--collect-only", "-q", *quick]
        _started(command, tmp_path / "site")
