"""Ranges of weight files and checkpoints, read in pieces: each has the bits of the whole tensor there, or is
refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from deltasync import limits
from deltasync.channel import anchors
from deltasync.errors import CorruptDataError, ModelMismatchError
from deltasync.opening import checkpoint, ranges
from deltasync.opening.ranges import RangedFile
from deltasync.tensors import TensorSpec
from deltasync.tensors.bits import bits_of, spec_of

TENSORS = {
    "a": (torch.arange(5000) % 97).to(torch.bfloat16).reshape(50, 100),
    "byte": (torch.arange(1003) % 5).to(torch.uint8),
    "double": torch.arange(301, dtype=torch.float64),
    "none": torch.empty(0, 3, dtype=torch.float32),
    "one": torch.tensor(1.5, dtype=torch.float32),
}
SPECS = {name: spec_of(name, tensor) for name, tensor in TENSORS.items()}
WHOLE = {name: (0, spec.element_count) for name, spec in SPECS.items()}
PART = {"a": (1234, 1999), "byte": (1, 1002), "double": (300, 301), "none": (0, 0), "one": (0, 0)}
NOTHING = dict.fromkeys(SPECS, (0, 0))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PIECE_BYTES", 64)
    monkeypatch.setattr(ranges, "_GAP_BYTES", 24)


def in_memory(data: bytes | memoryview) -> RangedFile:
    def read(first: int, last: int) -> bytes:
        assert 0 <= first < last <= len(data)
        return bytes(data[first:last])

    return RangedFile(len(data), read)


def weight_file() -> bytes:
    ((_, data),) = anchors.weight_files(TENSORS, dict.fromkeys(TENSORS, 7), 1 << 30)
    return bytes(data)


def joined(pieces: list[ranges.Piece], wanted: ranges.Ranges) -> dict[str, np.ndarray]:
    """The pieces, put together; no element is missing, and none came twice."""
    found = {name: np.zeros(stop - start, SPECS[name].bits_dtype) for name, (start, stop) in wanted.items()}
    came = {name: np.zeros(bits.size, np.int64) for name, bits in found.items()}
    for name, at, bits_N in pieces:
        first = at - wanted[name][0]
        found[name][first : first + bits_N.size] = bits_N
        came[name][first : first + bits_N.size] += 1
    assert all((count == 1).all() for count in came.values())
    return found


@pytest.mark.parametrize("wanted", [WHOLE, PART, NOTHING])
def test_ranges_of_a_weight_file_have_its_bits(wanted: ranges.Ranges) -> None:
    found = list(ranges.read_weights(in_memory(weight_file()), SPECS, wanted))
    assert sorted(each for each in found if isinstance(each, str)) == sorted(SPECS)
    pieces = [each for each in found if not isinstance(each, str)]
    assert max((bits_N.nbytes for *_, bits_N in pieces), default=0) <= 64
    for name, bits_N in joined(pieces, wanted).items():
        assert np.array_equal(bits_N, bits_of(TENSORS[name])[slice(*wanted[name])]), name


def test_a_damaged_weight_file_is_refused() -> None:
    data = weight_file()
    with pytest.raises(CorruptDataError):
        list(ranges.read_weights(in_memory(data[:-1]), SPECS, WHOLE))
    with pytest.raises(CorruptDataError, match="too short"):
        list(ranges.read_weights(in_memory(data[:7]), SPECS, WHOLE))
    with pytest.raises(CorruptDataError, match="header is too long"):
        list(ranges.read_weights(in_memory(b"\xff" * 8 + data[8:]), SPECS, WHOLE))
    for other in (TensorSpec("a", "bfloat16", (100, 50)), TensorSpec("a", "float32", (50, 100))):
        with pytest.raises(CorruptDataError):
            list(ranges.read_weights(in_memory(data), SPECS | {"a": other}, WHOLE))
    with pytest.raises(CorruptDataError, match="'one'"):
        list(
            ranges.read_weights(
                in_memory(data), {name: spec for name, spec in SPECS.items() if name != "one"}, WHOLE
            )
        )


def test_ranges_of_a_checkpoint_are_rounded_as_the_whole_is(tmp_path: Path) -> None:
    wide = {"w": torch.randn(40, 7), "kept": torch.arange(9)}
    save_file(wide, tmp_path / "model.safetensors")
    found = checkpoint.load(checkpoint.find(tmp_path))
    specs = {"w": TensorSpec("w", "bfloat16", (40, 7)), "kept": TensorSpec("kept", "int64", (9,))}
    whole = dict(found.read(specs))
    wanted = {"w": (13, 171), "kept": (2, 9)}
    for name, at, bits_N in (pieces := list(found.ranges(specs, wanted))):
        assert np.array_equal(bits_N, whole[name][at : at + bits_N.size])
    assert {name: sum(bits_N.size for other, _, bits_N in pieces if other == name) for name in wanted} == {
        "w": 158,
        "kept": 7,
    }
    with pytest.raises(ModelMismatchError, match="model as"):
        list(found.ranges(specs | {"w": TensorSpec("w", "bfloat16", (7, 40))}, NOTHING | wanted))
    with pytest.raises(ModelMismatchError, match="lacks other"):
        list(found.ranges({"other": TensorSpec("other", "bfloat16", (1,))}, {"other": (0, 1)}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CorruptDataError):
        list(found.ranges(specs, wanted))
