"""An editable install is a path, so that scripts beside the checkout and type checkers find the packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A script beside a checkout: the folder of this name in its own directory is found first, and is no package.
_SCRIPT = "from deltasync import Publisher; import deltasync; print(deltasync.__file__)"


def test_scripts_beside_the_checkout_find_the_package(tmp_path: Path) -> None:
    checkout, wheels, site = tmp_path / "deltasync", tmp_path / "wheels", tmp_path / "site"
    packages = ("deltasync", "vllm_plugin", "sglang_plugin", "mlx_plugin", "trl_callback")
    for name in packages:
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, checkout)
    build = f"import setuptools.build_meta as build; build.build_editable({str(wheels)!r})"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["CC"] = "false"  # the extension is optional, and takes a while
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=checkout, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if ".dist-info/" not in name]
        assert len(names) == 1 and names[0].endswith(".pth"), (
            "what is imported by a finder is not seen by type checkers"
        )
        assert opened.read(names[0]).decode().split() == [str(checkout)]
        site.mkdir()
        opened.extractall(site)
    script = tmp_path / "script.py"
    others = (
        # this environment's own install
        f"import sys; sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]"
    )
    script.write_text(f"{others}; import site; site.addsitedir({str(site)!r}); {_SCRIPT}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], env=environ, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(checkout / "deltasync" / "__init__.py"), done.stderr
