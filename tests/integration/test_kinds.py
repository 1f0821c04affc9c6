"""Every way of cutting a model over ranks is published whole, or refused by all ranks: the table of
guides/sharded.md.

The loops of the guide run as they are printed, with an evaluation between.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_sharded import ROOT, torchrun

_PAGE = ROOT / "docs/guides/sharded.md"
_ROW = re.compile(
    r"^\| `([^`]+)` \| (published|refused at the start|refused after an evaluation) \|", re.MULTILINE
)

SAID = dict(_ROW.findall(_PAGE.read_text()))
"""The kinds of the guide's table, and what it says of each."""

_BLOCK = re.compile(r"^```python\n# needs ([^:\n]+):[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)

LOOPS = dict(_BLOCK.findall(_PAGE.read_text()))
"""The guide's loops by what they need."""

_ZERO = "DeepSpeed ZeRO-3"

FEW = [
    "fsdp2 root",
    "fsdp2 named_parameters",
    "fsdp2 wrapper subclasses",
    "fsdp1",
    "tensor parallel",
    "wrapper subclasses on all ranks",
    "experts by local names",
]
_FIRST = [[1, "anchor"], [2, "delta"], [3, "delta"], [4, "delta"]]


def run(folder: Path, size: int, names: list[str], **environ: str) -> dict[str, list[dict[str, Any]]]:
    """What each rank was told of each kind."""
    torchrun(size, folder, *names, script="kinds_ranks.py", timeout_s=900, **environ)
    files = {
        name: [folder / f"{name.replace(' ', '-')}.{rank}.json" for rank in range(size)] for name in names
    }
    return {name: [json.loads(file.read_text()) for file in each] for name, each in files.items()}


def prove(said: str, told: list[dict[str, Any]], versions: list[list[Any]]) -> None:
    """All ranks have the same outcome, and it is the one that the guide says. The ranks have compared the
    bits.
    """
    if said == "published":
        assert all(each == {"versions": versions} for each in told), told
        return
    assert all("refused" in each and each["versions"] == told[0]["versions"] for each in told), told
    ((step, kind),) = {tuple(each["refused"][:2]) for each in told}
    assert kind in ("ConfigError", "ModelMismatchError")
    assert (step == 0) == (said == "refused at the start"), told


def test_the_table_names_every_kind() -> None:
    source = (ROOT / "tests/integration/kinds_ranks.py").read_text()
    kinds = re.findall(r'^    "([^"]+)": ', source[source.index("KINDS:") :], re.MULTILINE)
    assert len(kinds) > 20 and list(SAID) == kinds


def test_the_guide_has_these_loops() -> None:
    assert list(LOOPS) == ["FSDP2", "tensor parallelism", "shards of another kind", "DDP", _ZERO]
    assert all(".publish(" in loop for loop in LOOPS.values())


def assert_outcomes(told: dict[str, list[dict[str, Any]]]) -> None:
    for name, ranks in told.items():
        if name in LOOPS:
            assert ranks == [{"loop": name}] * len(ranks)
        else:
            prove(SAID[name], ranks, _FIRST)


def test_loops_and_a_part_of_the_table_hold_on_two_ranks(tmp_path: Path) -> None:
    assert_outcomes(run(tmp_path / "kinds", 2, [*FEW, *(name for name in LOOPS if name != _ZERO)]))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_loop_with_deepspeed_publishes_the_model(tmp_path: Path, size: int, deepspeed: Path) -> None:
    environ = {
        "PYTHONPATH": f"{ROOT}:{deepspeed}",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": f"{deepspeed}/built",
    }
    assert_outcomes(run(tmp_path / "kinds", size, [_ZERO], **environ))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_the_table_holds_and_other_ranks_go_on(tmp_path: Path, size: int) -> None:
    assert_outcomes(run(tmp_path / "kinds", size, [*SAID, *(name for name in LOOPS if name != _ZERO)]))
    others = [name for name in SAID if SAID[name] == "published"]
    for told in run(tmp_path / "kinds", 6 - size, others).values():
        prove("published", told, [[5, "delta"], [6, "delta"]])
