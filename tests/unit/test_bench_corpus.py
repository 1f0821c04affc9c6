"""benchmarks.corpus on a run of three steps that is counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.codec import measure
from benchmarks.corpus import __main__ as command
from benchmarks.corpus import changes, report, runs
from deltasync import Publisher
from deltasync.errors import ConfigError, NotPublishedError
from deltasync.tensors import TensorSpec

PATIENCE_S = 60.0
ONE, ONE_UP, MINUS = 0x3F80, 0x3F81, 0xBF80
SPECS = {
    "model.embed.weight": TensorSpec("model.embed.weight", "bfloat16", (4,)),
    "model.layers.0.q_proj.weight": TensorSpec("model.layers.0.q_proj.weight", "bfloat16", (2, 2)),
}
# Bits of the eight elements: four of the embedding, four of the matrix.
STATES = np.array(
    [
        [ONE] * 8,
        [ONE_UP, ONE, ONE, ONE, ONE_UP, MINUS, ONE, ONE],
        [ONE_UP + 1, ONE, ONE, ONE, ONE, MINUS, ONE, ONE],
        [ONE, ONE, ONE, ONE, ONE, MINUS, ONE, ONE + 20],
    ],
    np.uint16,
)


def _folder(tmp_path: Path, states: np.ndarray = STATES, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A folder with the run `a`."""
    weights = [
        {
            name: torch.from_numpy(part.copy()).view(torch.bfloat16).to(dtype)
            for name, part in _parts(state).items()
        }
        for state in states
    ]
    (tmp_path / "base").mkdir()
    save_file(weights[0], tmp_path / "base" / "model.safetensors")
    with Publisher((tmp_path / "a").as_uri(), initial=tmp_path / "base", dtype="auto") as publisher:
        for step, each in enumerate(weights):
            publisher.publish(each, step=step).wait(PATIENCE_S)
    logged = {"learning_rate": 1e-6, "steps": [{"step": step, "reward": step / 10} for step in (1, 2, 3)]}
    (tmp_path / "a.json").write_text(json.dumps(logged))
    return tmp_path


def _parts(state: np.ndarray) -> dict[str, np.ndarray]:
    parts = runs.by_tensor(SPECS, state)
    return {name: part.reshape(SPECS[name].shape) for name, part in parts.items()}


@pytest.fixture(autouse=True)
def _few_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PEERS", measure.PEERS[:1])  # the others compile for a while


def test_a_folder_is_measured(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    version = {"changed_fraction": 0.02, "delta_bytes": 100, "bits_per_changed": 6.0, "step": 1}
    logged = {"learning_rate": 1e-5, "steps": [{"step": 1, "reward": 0.9}], "versions": [version]}
    (folder / "b.json").write_text(json.dumps(logged))
    result = json.loads(json.dumps(command.measure(folder, None)))
    (run,) = result["runs"]
    assert [step["changed"] for step in run["steps"]] == [3, 2, 2]
    assert [step["reward"] for step in run["steps"]] == [0.1, 0.2, 0.3]
    assert all(step["payload_bytes"]["context"] > 0 for step in run["steps"])
    assert [(span["first_step"], span["last_step"]) for span in run["spans"]] == [(1, 1), (2, 2), (3, 3)]
    assert {each["name"] for each in run["spans"][0]["encodings"]} == {
        "raw",
        "packed",
        "context",
        "int32 + bf16",
    }
    (figures,) = result["figures_only"]
    assert figures["steps"][0]["reward"] == 0.9 and figures["steps"][0]["payload_bytes"] == {"context": 100}
    text = "\n".join(report.lines(result))
    assert "1e-6, step 1, 37.50%" in text and "| 1e-5" in text


def test_changes_are_those_counted_by_hand() -> None:
    trace = changes.Trace(SPECS, STATES[0])
    first, second, third = (trace.add(state) for state in STATES[1:])
    assert first["by_kind"] == {"embed": 1, "q_proj": 2}
    assert first["by_ulps"] == [2, 0, 0, 0, 0, 1]  # the changed sign is the largest step there is
    assert (first["grew"], first["sign_changed"], first["changed_before"]) == (2, 1, 0)
    assert (second["changed_in_the_step_before"], second["in_the_same_direction"], second["returned"]) == (
        2,
        1,
        1,
    )
    assert third["by_ulps"] == [0, 1, 0, 0, 0, 1]
    assert (third["changed_before"], third["changed_in_the_step_before"], third["returned"]) == (1, 1, 0)
    total = trace.total()
    assert (total["steps"], total["ever_changed"], total["as_at_the_start"]) == (3, 4, 2)
    assert total["changes_by_layer"] == {"embed": 3, "0": 4}
    assert total["elements_by_kind"] == {"embed": 4, "q_proj": 4}


def test_states_are_the_published_bits(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (run,) = runs.find(folder)
    found = list(run.states(folder / "base"))
    assert [(state.version, state.step) for state in found] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    np.testing.assert_array_equal([state.bits_N for state in found], STATES)


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        runs.find(tmp_path)
    folder = _folder(tmp_path, STATES[:1])
    with pytest.raises(NotPublishedError):
        command.measure(folder, None)
    other = tmp_path / "other"
    other.mkdir()
    save_file(
        {name: torch.zeros(spec.shape, dtype=torch.bfloat16) for name, spec in SPECS.items()},
        other / "model.safetensors",
    )
    with pytest.raises(ConfigError):
        list(runs.find(folder)[0].states(other))
