"""A release: what is uploaded, checked where nothing else is installed, and the signed tag.

    make dist                      # which ends with: python requirements/release.py extensions
    python requirements/release.py check python3.11 python3.12 python3.13
    python requirements/release.py tag --dry-run

`check` installs the wheel in a new environment of each Python, with the newest versions of its requirements,
publishes versions and follows them, where no compiler is found. A warning that our code causes is an error.
The environments are temporary, and hold several GB each where pip finds a CUDA build of torch; TMPDIR chooses
their disk. `tag` signs the version that pyproject.toml names, once the tree says the same everywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION = PROJECT["version"]
MACHINES = {"x86_64": 62, "aarch64": 183}  # by their numbers in an ELF header
USE = """
import warnings
warnings.filterwarnings("error", module="deltasync|vllm_plugin|sglang_plugin|mlx_plugin|trl_callback")
import sys
from pathlib import Path
import torch
from deltasync import Publisher, Replica
import deltasync
from deltasync.kernels import native
assert "site-packages" in deltasync.__file__, deltasync.__file__
assert native.extension() is not None
for url in ("memory://release", f"file://{Path.cwd()}/channel"):
    weights = {"w": torch.arange(1 << 16, dtype=torch.float32), "bias": torch.zeros(7)}
    with Publisher(url) as publisher:
        publisher.publish(weights.items()).wait(60)
        weights["w"][7] += 1
        assert publisher.publish(weights.items()).wait(60).kind == "delta"
    replica = Replica(url)
    assert replica.sync() == 2
    for name, tensor in weights.items():
        assert torch.equal(replica.state_dict()[name].view(torch.int16), tensor.bfloat16().view(torch.int16)), name
weights["w"][7] += 1
Publisher(url, resume=True).publish(weights.items())  # the exit of the process stores it
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}: published and read back")
"""


def files() -> tuple[Path, Path]:
    """Return the wheel and the sdist of this version in dist/, or end."""
    dist = ROOT / "dist"
    wheels, sdist = (
        [*dist.glob(f"deltasync-{VERSION}-cp311-abi3-*_{platform.machine()}.whl")],
        dist / f"deltasync-{VERSION}.tar.gz",
    )
    if len(wheels) != 1 or not sdist.is_file():
        sys.exit("There is no wheel of this version and machine in dist/, or no sdist. Run: make dist")
    return wheels[0], sdist


def incomplete(wheel: Path, sdist: Path) -> list[str]:
    """Say what the two files lack."""
    in_wheel = zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    problems = [] if any(name.endswith("/LICENSE") for name in in_wheel) else ["the wheel has no LICENSE"]
    if "deltasync/_native.abi3.so" not in in_wheel:
        problems.append("the wheel has no deltasync/_native.abi3.so; was there a C compiler?")
    needed = (
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "docs/index.md",
        "tests/conftest.py",
        "examples/demo/run.py",
    )
    problems += [f"the sdist has no {name}" for name in needed if name not in in_sdist]
    tracked = subprocess.run(
        ["git", "ls-files", "deltasync", "tests"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    problems += [f"the sdist has no {name}" for name in tracked.stdout.splitlines() if name not in in_sdist]
    return problems


def extensions() -> list[str]:
    """Say which wheel of dist/ has no extension for its machine, or one that needs a newer glibc than its
    name promises.
    """
    problems = []
    for machine, number in MACHINES.items():
        wheels = [*(ROOT / "dist").glob(f"deltasync-{VERSION}-*manylinux_*_{machine}.whl")]
        if len(wheels) != 1:
            problems.append(f"dist/ has {len(wheels)} wheels for {machine}")
            continue
        with zipfile.ZipFile(wheels[0]) as archive:
            found = "deltasync/_native.abi3.so" in archive.namelist()
            code = archive.read("deltasync/_native.abi3.so") if found else b""
        # e_machine of the ELF header
        if code[:4] != b"\x7fELF" or int.from_bytes(code[18:20], "little") != number:
            problems.append(f"{wheels[0].name} has no extension for {machine}")
        promised = re.search(r"manylinux_2_(\d+)_", wheels[0].name)
        needed = max((int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", code)), default=0)
        if promised is None or needed > int(promised[1]):
            problems.append(f"{wheels[0].name} needs glibc 2.{needed}")
    return problems


def check(pythons: list[str]) -> list[str]:
    """Use the wheel in a new environment of each Python; return what failed."""
    wheel, sdist = files()
    problems = incomplete(wheel, sdist)
    for python in pythons:
        if shutil.which(python) is None:
            problems.append(f"{python} is not installed, so nothing is known of it")
            continue
        with tempfile.TemporaryDirectory(prefix="deltasync-release-") as folder:
            own = f"{folder}/venv/bin"
            for command in (
                [python, "-m", "venv", f"{folder}/venv"],
                [f"{own}/pip", "install", "--quiet", str(wheel)],
                [f"{own}/pip", "check"],
                [f"{own}/deltasync", "--help"],
                [f"{own}/python", "-m", "deltasync"],
                [f"{own}/python", "-c", USE],
                [f"{own}/deltasync", "follow", "--once", "--json", f"file://{folder}/channel"],
            ):
                began_s = time.monotonic()
                environ = {**os.environ} | ({"PATH": own} if command[0] != python else {})
                done = subprocess.run(
                    command, cwd=folder, env=environ, capture_output=True, text=True, check=False
                )
                if done.returncode or "Traceback" in done.stderr:
                    said = (done.stderr or done.stdout).strip().splitlines()[-1:]
                    problems.append(f"{python}: {' '.join(command[:3])} failed: {''.join(said)}")
                    break
                if USE in command:
                    print(done.stdout.strip(), flush=True)
                if command[-1] == "deltasync":
                    print(done.stdout, f"the tour took {time.monotonic() - began_s:.1f} s", flush=True)
            else:
                if json.loads(done.stdout)["version"] != 3:
                    problems.append(
                        f"{python}: the version that was published last is not visible: {done.stdout.strip()}"
                    )
    return problems


def unready() -> list[str]:
    """Say what a release of this version still lacks in the tree."""
    code = (ROOT / "deltasync/__init__.py").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    status = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    tags = subprocess.run(
        ["git", "tag", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    problems = (
        []
        if f'__version__ = "{VERSION}"' in code
        else [f"deltasync/__init__.py has another version than {VERSION}"]
    )
    if re.search(rf"(?m)^## {re.escape(VERSION)} \(\d{{4}}-\d\d-\d\d\)$", changes) is None:
        problems.append(f"CHANGELOG.md has no heading such as '## {VERSION} (2027-01-31)'")
    if not PROJECT.get("urls"):
        problems.append(
            "pyproject.toml has no [project.urls]; name the public repository, pages and changelog there"
        )
    if status:
        problems.append("the tree has changes that are not committed")
    if f"v{VERSION}" in tags:
        problems.append(f"the tag v{VERSION} exists")
    return problems


def main() -> int:
    """Do what the command line says; 1 if something is missing or failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("extensions")
    commands.add_parser("check").add_argument(
        "pythons", nargs="+", metavar="PYTHON", help="such as python3.12"
    )
    commands.add_parser("tag").add_argument(
        "--dry-run", action="store_true", help="say what is missing, and make no tag"
    )
    given = parser.parse_args()
    if given.command == "check":
        problems = check(given.pythons)
    else:
        problems = extensions() if given.command == "extensions" else unready()
    for problem in problems:
        print(f"not ready: {problem}", file=sys.stderr)
    command = ["git", "tag", "--sign", f"v{VERSION}", "--message", f"deltasync {VERSION}"]
    if given.command == "tag" and given.dry_run:
        print("would run:", " ".join(command))
    elif given.command == "tag" and not problems:
        subprocess.run(command, cwd=ROOT, check=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
