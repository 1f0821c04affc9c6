"""benchmarks.rivals on two small layers. Systems whose packages are not installed are skipped: make rivals
installs them.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.rivals import __main__ as command
from benchmarks.rivals import xet
from benchmarks.rivals.systems import SYSTEMS, WEIGHTS

MODULES = {
    "deltasync": "deltasync",
    "basilica-sdk": "basilica",
    "fireworks-delta-compression": "fireworks_delta_compression",
    "modelexpress": "modelexpress_rl",
    "vllm": "vllm",
    "reminis": "reminis",
    "moonclip": "moonclip",
    "deltatensors": "deltatensors",
}


def _weights(seed: int, base: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    if base is None:
        names = ("model.layers.0.q_proj.weight", "model.layers.1.norm.weight")
        return {name: torch.randn(64, 128, generator=random).to(torch.bfloat16) for name in names}
    found = {name: tensor.clone() for name, tensor in base.items()}
    for tensor in found.values():
        tensor.view(torch.int16).add_((torch.rand(tensor.shape, generator=random) < 0.02).to(torch.int16))
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    old = _weights(0)
    for folder in (tmp_path, tmp_path / "few"):
        for name, weights in (("old", old), ("new", _weights(1, old))):
            (folder / name).mkdir(parents=True)
            save_file(weights, folder / name / WEIGHTS)
    return tmp_path


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_is_measured(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = SYSTEMS[name]
    if kind.package == "vllm" or importlib.util.find_spec(MODULES[kind.package]) is None:
        pytest.skip(f"{kind.package} is measured by make rivals")
    monkeypatch.setattr(command, "FLIPS", 4)
    found = json.loads(json.dumps(command._measure_system(kind, place)))
    assert found["payload_bytes"] > 0 and sum(found["flipped"].values()) == 4
    assert not found["wrong_elements"] or "int4" in name
    if kind.package == "deltasync":
        assert found["flipped"]["wrong"] == found["flipped"]["refused_with_changed_weights"] == 0
    assert found.get("runs_code_of_payloads", True)


def test_xet_uploads_what_changed(tmp_path: Path) -> None:
    old = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (1 << 22,), generator=old, dtype=torch.uint8)
    (tmp_path / "old").write_bytes(data.numpy().tobytes())
    data[1 << 20] ^= 1
    (tmp_path / "new").write_bytes(data.numpy().tobytes())
    found = xet.measure(tmp_path / "old", tmp_path / "new", 0.01)
    assert found["chunks"] - 3 <= found["known_chunks"] < found["chunks"]
    assert 0 < found["uploaded_bytes"] < found["file_bytes"] / 4
    assert found["expected_known_share"] < 1e-140
