"""The built wheel in a clean environment without vLLM and TRL, as a user gets it."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.unit.test_imports import ROOMS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

CHECK = """
import sys
import deltasync
assert not {'torch', 'numpy', 'obstore'} & set(sys.modules)
import torch
from deltasync import Publisher, Replica
weights = {"w": torch.arange(1000, dtype=torch.float32)}
with Publisher("memory://wheel") as publisher:
    publisher.publish(weights.items())
    weights["w"][7] += 1
    publisher.publish(weights.items())
replica = Replica("memory://wheel")
assert replica.sync() in (1, 2)
assert torch.equal(replica.state_dict()["w"], weights["w"].bfloat16())
from deltasync.kernels import native
assert native.extension() is not None and "site-packages" in native._native.__file__
import sglang_plugin
import vllm_plugin
assert not {"vllm", "trl"} & set(sys.modules)
print("wheel ok")
"""


def run(*command: str | Path, cwd: Path, **environ: str) -> str:
    environ = {**os.environ, "PYTHONPATH": "", **environ}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # Build from a copy: setuptools leaves its build folder beside the sources, and old files in it would join
    # the wheel.
    source = out / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in tracked.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, source, cwd=out)
    return next(out.glob("deltasync-*.whl"))


def test_the_two_files_of_a_release_are_complete(wheel: Path) -> None:
    """The sdist has licence, pages, tests, and every file of the packages."""
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(wheel.parent)!r})"
    run(sys.executable, "-c", code, cwd=wheel.parent / "source")
    (sdist,) = wheel.parent.glob("deltasync-*.tar.gz")
    incomplete = runpy.run_path(str(ROOT / "requirements/release.py"))["incomplete"]
    assert incomplete(wheel, sdist) == []
    assert "the sdist has no docs/index.md" in incomplete(wheel, _without_pages(sdist))


def _without_pages(sdist: Path) -> Path:
    smaller = sdist.with_name("smaller.tar.gz")
    with tarfile.open(sdist) as whole, tarfile.open(smaller, "w:gz") as left:
        for member in whole.getmembers():
            if "/docs/" not in member.name:
                left.addfile(member, whole.extractfile(member) if member.isfile() else None)
    return smaller


def installed(needs: Distribution, seen: set[str], extras: tuple[str, ...] = ()) -> Iterator[Path]:
    """What is in site-packages here of the dependencies of a distribution, and of theirs."""
    for requirement in map(Requirement, needs.requires or ()):
        marker = requirement.marker
        if str(requirement) in seen or (
            marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras))
        ):
            continue
        seen.add(str(requirement))
        found = distribution(requirement.name)
        names = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
        yield from (Path(str(found.locate_file(name))) for name in names)
        yield from installed(found, seen, tuple(requirement.extras))


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    packages = {"deltasync", "vllm_plugin", "sglang_plugin", "mlx_plugin", "trl_callback"}
    assert {name for name in top if not name.endswith(".dist-info")} == packages
    files = {name for name in names if name.split("/")[0] in packages and not name.endswith(".py")}
    assert files == {
        "deltasync/_native.abi3.so",
        "vllm_plugin/page.html",
        *(f"deltasync/ops/dashboard/{name}" for name in ("page.html", "page.css", "page.js", "charts.js")),
        *(f"{package}/py.typed" for package in packages),
    }
    rooms = {name.split("/")[1] for name in names if name.startswith("deltasync/") and name.count("/") > 1}
    assert rooms == set(ROOMS)
    assert any(name.endswith("/LICENSE") for name in names)


def test_it_works_without_vllm_and_trl(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", wheel, cwd=tmp_path)
    (site,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    (metadata,) = site.glob("deltasync-*.dist-info")
    for path in installed(Distribution.at(metadata), set()):
        if not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    run(*pip, "check", cwd=tmp_path)
    assert "wheel ok" in run(python, "-c", CHECK, cwd=tmp_path, PYTHONWARNINGS="ignore")
    assert "Commands:" in run(tmp_path / "venv" / "bin" / "deltasync", "--help", cwd=tmp_path)
