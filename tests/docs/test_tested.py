"""requirements/tested.toml is the one place of tested versions: the README's line and the extras follow it, and
the Makefile installs what it names first.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.docs.pages import ROOT

TESTED: dict[str, list[str]] = tomllib.loads((ROOT / "requirements/tested.toml").read_text())
NAMES = {
    "vLLM": "vllm",
    "SGLang": "sglang",
    "MLX": "mlx",
    "TRL": "trl",
    "verl": "verl",
    "transformers": "transformers",
    "torch": "torch",
}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def _line(name: str) -> str:
    """Say the tested versions of a package: `1.9 to 1.16`, `0.32 and 0.33`."""
    versions = [str(version).removesuffix(".0") for version in sorted(map(Version, TESTED[name]))]
    return f"{versions[0]} to {versions[-1]}" if len(versions) > 2 else " and ".join(versions)


def test_the_readme_names_the_tested_versions() -> None:
    line = "**Tested with** " + ", ".join(f"{label} {_line(name)}" for label, name in NAMES.items()) + "."
    assert line in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("extra", ["vllm", "sglang", "mlx", "trl"])
def test_an_extra_allows_the_tested_versions_and_no_older_ones(extra: str) -> None:
    for requirement in map(Requirement, EXTRAS[extra]):
        if requirement.name in TESTED:
            versions = sorted(map(Version, TESTED[requirement.name]))
            assert all(version in requirement.specifier for version in versions), requirement
            lowest = [
                Version(each.version) for each in requirement.specifier if each.operator in (">=", "==")
            ]
            assert [each.release[:2] for each in lowest] == [versions[0].release[:2]], requirement


def test_the_makefile_installs_the_versions_that_come_first() -> None:
    commands = [
        "make", "--dry-run", "--always-make", "--no-print-directory",
        "setup", "test-vllm", "test-sglang", "test-mlx", "test-ray",
    ]  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(commands, cwd=ROOT, capture_output=True, text=True, check=True, env=environ).stdout
    for name, (first, *_) in TESTED.items():
        assert re.search(rf"\b{name}(\[\w+\])?=={re.escape(first)}(?![\d.])", done), name
