from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync.codec import classes as codec_classes
from deltasync.codec import tables, tiles, vector
from deltasync.errors import CorruptDataError
from deltasync.kernels import native, rans, reference
from deltasync.tensors import TensorSpec
from tests import deltas
from tests import strategies as our
from tests.instructions import LEVELS


@given(st.integers(0, (1 << 64) - 1) | st.integers(0, 100))
def test_every_number_lies_in_one_bucket(value: int) -> None:
    symbol, extra, low = reference.bucket(value)
    assert 0 <= symbol < 256 and 0 <= low < 1 << extra
    assert value == (symbol if symbol < 16 else ((4 + symbol % 4) << extra) + low)
    assert extra == (0 if symbol < 16 else symbol // 4 - 2)


@given(our.widths, st.data())
def test_zigzag_is_a_bijection_of_the_steps(width: int, data: st.DataObject) -> None:
    step = data.draw(st.integers(1, (1 << 8 * width) - 1))
    value = reference.zigzag(step, 8 * width)
    assert 0 <= value <= (1 << 8 * width) - 2
    assert reference.unzigzag(value, 8 * width) == step


def test_zigzag_of_the_smallest_steps() -> None:
    assert [reference.zigzag(step & 0xFFFF, 16) for step in (-1, 1, -2, 2)] == [0, 1, 2, 3]


def test_ratios_double_each_eight_levels() -> None:
    assert (np.diff(rans.RATIO) > 0).all()
    assert rans.RATIO[[0, 4, 8, 80, 160]].tolist() == [256, 362, 512, 256 << 10, 256 << 20]


@given(st.lists(st.integers(0, 1 << 40) | st.just(0), max_size=256))
def test_tables_round_trip(counts: list[int]) -> None:
    count_TS = np.zeros((2, 256), np.int64)
    count_TS[0, : len(counts)], count_TS[1, 3] = counts, 5
    freq_TS = tables.fit(count_TS)
    assert (freq_TS.sum(axis=1) == tables.SLOTS).all() and (freq_TS[count_TS > 0] > 0).all()
    data, end_T = tables.all_bytes(freq_TS)
    assert end_T[-1] == data.size
    np.testing.assert_array_equal(tables.read(data.tobytes(), 2), freq_TS)
    np.testing.assert_array_equal(tables.read(data[: end_T[0]].tobytes(), 1), freq_TS[:1])
    with pytest.raises(CorruptDataError, match="more tables"):
        tables.read(data.tobytes(), 1)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"\0\0", b"\0\x80", b"\0\x81\x20", b"\1\x80\x20\0", b"\1\x80\x20", b"\xff" + b"\x10" * 255],
    ids=["empty", "no slots", "none", "cut", "too many", "last is none", "short", "too few"],
)
def test_malformed_tables_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptDataError):
        tables.read(data, 1)


def _weights_by_context() -> bytes:
    """A payload of weights of which some have rare exponents; decoded again, the bits are equal."""
    rng = np.random.default_rng(0)
    old = (rng.standard_normal((300, 256)) * 0.02).astype(np.float32)
    old[rng.random(old.shape) < 0.01], old[7, 9], old[8, :100] = 0, 3e38, 1e-30
    old_N = (old.reshape(-1).view(np.uint32) >> 16).astype(np.uint16)
    index_K = np.flatnonzero(rng.random(old_N.size) < 0.02)
    new_N, step_K = (
        old_N.copy(),
        np.where(rng.random(index_K.size) < 0.5, 1, -1).astype(np.int16).view(np.uint16),
    )
    new_N[index_K] += step_K
    specs = {"w": TensorSpec("w", "bfloat16", old.shape)}
    data = deltas.encode("context", specs, {"w": old_N}, {"w": new_N}).to_bytes()
    steps = deltas.decode(data, specs, {"w": old_N})[0].of("w")
    np.testing.assert_array_equal(steps.at_K, index_K)
    np.testing.assert_array_equal(steps.data_K, step_K)
    return data


def _at_each_level(run: Callable[[], Any]) -> dict[str, Any]:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for level in LEVELS:
            patch.setenv("DELTASYNC_SIMD", level)
            native.extension.cache_clear()
            assert (native.extension() is None) == (level == "none")
            found[level] = run()
    native.extension.cache_clear()
    return found


def test_every_instruction_set_and_numpy_give_the_same_bytes() -> None:
    found = _at_each_level(_weights_by_context)
    assert len(set(found.values())) == 1, {level: len(data) for level, data in found.items()}


@settings(max_examples=30)
@given(
    model=our.model_pairs(),
    codec_name=st.sampled_from(["packed", "context"]),
    tile=st.sampled_from([4, 1 << 20]),
)
def test_every_instruction_set_and_numpy_code_any_blocks_alike(
    model: Any, codec_name: str, tile: int
) -> None:
    """Small blocks and groups, tiles or none; what each level wrote it reads again."""

    def coded() -> tuple[bytes, list[Any]]:
        data = deltas.encode(codec_name, *model).to_bytes()
        delta, digests = deltas.decode(data, model[0], model[1])
        return data, [
            digests,
            {name: bits.tobytes() for name, bits in deltas.applied(delta, model[1]).items()},
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "BLOCK", 100)
        patch.setattr(vector, "GROUP_CHANGED", 50)
        for name, value in {"TILE": tile, "SMALL": 0, "LEAST": 0, "FEW": 0}.items():
            patch.setattr(tiles, name, value)
        found = _at_each_level(coded)
    assert all(each == found["none"] for each in found.values())
    assert found["none"][1][1] == {name: bits.tobytes() for name, bits in model[2].items()}


@pytest.mark.parametrize("runs", [0, 1, 40])
def test_groups_of_many_payloads_are_the_references(runs: int) -> None:
    """Runs of two kinds, which do not share tables, and some without a change; a group ends where a payload
    does.
    """
    random = np.random.default_rng(runs)
    value_V = np.array([0, 3, 100, 101, 102, 110, 255])
    rate_KVS = (
        random.random((2, value_V.size, 9))
        * np.array([1, 200])[:, None, None]
        * (random.random((2, 7, 9)) < 0.6)
    )
    step_RVS = random.poisson(rate_KVS[random.integers(0, 2, runs)]).astype(np.uint32)
    step_RVS[random.random(runs) < 0.1] = 0
    element_RE = random.random((runs, 256)) * 5000
    bound_P = np.unique([0, *random.integers(0, runs + 1, 3), runs])

    def grouped() -> tuple[list[int], list[Any]]:
        first_G, classes = native.groups(bound_P, element_RE, value_V, step_RVS, codec_classes.COSTS)
        assert {*bound_P[:-1]} <= {*first_G}
        return first_G.tolist(), [each.tolist() for each in classes]

    found = _at_each_level(grouped)
    assert all(each == found["none"] for each in found.values())
    assert runs < 40 or 4 < len(found["none"][0]) < runs
