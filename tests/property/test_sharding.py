"""One shard against several, without processes: the same bits, changes and fingerprints, whatever the ranges."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltasync import codec
from deltasync.errors import ConfigError, CorruptDataError, ModelMismatchError
from deltasync.kernels import cpu_diff
from deltasync.publish.shadow import Shadow, Snapshot, check_coverage
from deltasync.publish.stream import TensorRange, range_of
from deltasync.ranks.peers import Range
from deltasync.tensors import TensorSpec, fingerprint
from deltasync.tensors.bits import tensor_of
from tests import strategies

Bits = dict[str, np.ndarray]


@st.composite
def cuts(draw: st.DrawFn, specs: dict[str, TensorSpec], ranks: int) -> list[dict[str, Range]]:
    """What each rank holds of each tensor: any uneven and empty ranges, in any order of the ranks."""
    held: list[dict[str, Range]] = [{} for _ in range(ranks)]
    for name, spec in specs.items():
        between = draw(st.lists(st.integers(0, spec.element_count), min_size=ranks - 1, max_size=ranks - 1))
        bounds = [0, *sorted(between), spec.element_count]
        for rank, at in enumerate(draw(st.permutations(range(ranks)))):
            held[rank][name] = bounds[at], bounds[at + 1]
    return held


def stream(specs: dict[str, TensorSpec], bits: Bits, ranges: dict[str, Range]) -> list[tuple[str, TensorRange]]:
    found = []
    for name, spec in specs.items():
        start, stop = ranges[name]
        flat_N = tensor_of(bits[name].copy(), spec).reshape(-1)
        found.append((name, TensorRange(flat_N[start:stop], start, spec.shape)))
    return found


def encoded(shadow: Shadow, changes: dict, name: str) -> bytes:
    encoder = codec.get(name).encoder()
    with mock.patch("deltasync.codec.blocks.BLOCK", 32):
        for tensor, patch in changes.items():
            start = shadow.ranges[tensor][0]
            encoder.add(shadow.specs[tensor], patch.index_K, patch.data, shadow.bits[tensor], "0" * 16, start)
        return encoder.finish(2, 1).to_bytes()


@pytest.mark.parametrize("codec_name", ["packed", "context", "raw"])
@pytest.mark.parametrize("ranks", [2, 4, 16])
@given(data=st.data(), model=strategies.model_pairs())
def test_shards_add_up_to_the_whole(codec_name: str, ranks: int, data: st.DataObject, model: tuple) -> None:
    specs, old, new = model
    whole = {name: (0, spec.element_count) for name, spec in specs.items()}
    alone = Shadow.of(stream(specs, old, whole), "keep", 0)
    changed = {name: patch.changed for name, patch in alone.advance(stream(specs, new, whole), "keep", 0).items()}

    held = data.draw(cuts(specs, ranks))
    check_coverage(specs, held)
    found = {name: bits.copy() for name, bits in old.items()}
    sums = dict.fromkeys(specs, 0)
    for rank, ranges in enumerate(held):
        shadow = Shadow.of(stream(specs, old, ranges), "keep", rank)
        changes = shadow.advance(stream(specs, new, ranges), "keep", rank)
        payload = codec.open_payload(encoded(shadow, changes, codec_name))

        def old_of_rank(name: str, ranges: dict[str, Range] = ranges) -> np.ndarray:
            known, (start, stop) = np.zeros_like(old[name]), ranges[name]
            known[start:stop] = old[name][start:stop]
            return known

        for patch in codec.get(codec_name).decode(payload, specs, old_of_rank):
            patch.apply(found[patch.name])
        for name, patch in changes.items():
            changed[name] -= patch.changed
        for name, part in shadow.fingerprints.items():
            sums[name] = (sums[name] + part) & fingerprint.MASK
    assert all(found[name].tobytes() == new[name].tobytes() for name in specs)
    assert not any(changed.values())
    assert sums == alone.fingerprints


def _taken(snapshot: Snapshot, old: dict[str, np.ndarray], name: str) -> bytes:
    out_N = np.empty_like(old[name])
    snapshot.take(name, out_N)
    return out_N.tobytes()


@given(st.lists(st.sampled_from(["forth", "back", "undone"]), max_size=30), strategies.model_pairs(), st.data())
def test_a_snapshot_has_the_bits_of_its_moment(moves: list[str], model: tuple, data: st.DataObject) -> None:
    specs, old, new = model
    whole = {name: (0, spec.element_count) for name, spec in specs.items()}
    shadow = Shadow.of(stream(specs, old, whole), "keep", 0)
    snapshot = shadow.snapshot()
    left = data.draw(st.permutations(list(specs)))
    for move in moves:
        shadow.advance(stream(specs, old if move == "back" else new, whole), "keep", 0)
        if move == "undone":
            shadow.retreat()
        if left and data.draw(st.booleans()):
            name = left.pop()
            assert _taken(snapshot, old, name) == old[name].tobytes()
    for name in left:
        assert _taken(snapshot, old, name) == old[name].tobytes()
    assert not snapshot.is_open


@given(data=st.data(), model=strategies.model_pairs())
def test_a_stream_that_is_undone_leaves_what_was_there(data: st.DataObject, model: tuple) -> None:
    specs, old, new = model
    ranges = data.draw(cuts(specs, 3))[1]
    shadow = Shadow.of(stream(specs, old, ranges), "keep", 1)
    before = dict(shadow.fingerprints)
    shadow.advance(stream(specs, new, ranges), "keep", 1)
    shadow.retreat()
    assert shadow.fingerprints == before
    assert all(shadow.bits[name].tobytes() == old[name][slice(*ranges[name])].tobytes() for name in specs)


def test_elements_that_nobody_or_two_hold_are_refused() -> None:
    specs = {"w": TensorSpec("w", "bfloat16", (4, 2))}
    check_coverage(specs, [{"w": (4, 8)}, {"w": (0, 0)}, {"w": (0, 4)}, {"w": (8, 8)}])
    check_coverage({"none": TensorSpec("none", "bfloat16", (0, 2))}, [{"none": (0, 0)}])
    missing = [(0, 4), (5, 8)], [(0, 4), (4, 7)], [(1, 4), (4, 8)], [(0, 0), (0, 0)]
    twice = [(0, 5), (4, 8)], [(0, 8), (0, 8)]
    for wrong in (*missing, *twice):
        with pytest.raises(ModelMismatchError):
            check_coverage(specs, [{"w": held} for held in wrong])
    with pytest.raises(ConfigError, match="group=group"):
        check_coverage(specs, [{"w": (0, 4)}])


def test_whole_tensors_are_those_of_the_first_rank() -> None:
    tensor = torch.ones(3, 2)
    assert range_of("w", tensor, 0).held.numel() == tensor.numel()
    assert (range_of("w", tensor, 1).start, range_of("w", tensor, 1).stop, range_of("w", tensor, 1).shape) == (0, 0, (3, 2))


def test_a_range_that_moves_is_refused_and_nothing_is_taken() -> None:
    specs = {"w": TensorSpec("w", "int16", (8,))}
    old, new = {"w": np.zeros(8, np.uint16)}, {"w": np.ones(8, np.uint16)}
    shadow = Shadow.of(stream(specs, old, {"w": (0, 4)}), "keep", 0)
    with pytest.raises(ModelMismatchError):
        shadow.advance(stream(specs, new, {"w": (4, 8)}), "keep", 0)
    assert not shadow.bits["w"].any()


def test_an_update_that_cannot_begin_leaves_the_bits() -> None:
    whole = {name: (0, 8) for name in "ab"}
    specs = {name: TensorSpec(name, "int16", (8,)) for name in whole}
    shadow = Shadow.of(stream(specs, {name: np.zeros(8, np.uint16) for name in whole}, whole), "keep", 0)
    before, advance, calls = dict(shadow.fingerprints), cpu_diff.advance, []

    def advance_once(*arguments: Any) -> Any:
        if calls:
            raise MemoryError
        calls.append(arguments)
        return advance(*arguments)

    with mock.patch.object(cpu_diff, "advance", advance_once), pytest.raises(MemoryError):
        shadow.advance(stream(specs, {name: np.ones(8, np.uint16) for name in whole}, whole), "keep", 0)
    shadow.retreat()
    assert shadow.fingerprints == before
    assert not any(bits.any() for bits in shadow.bits.values())


@pytest.mark.parametrize("touched", [True, False])
def test_an_interrupt_that_cannot_be_undone_ends_publishing(touched: bool) -> None:
    whole, specs = {"w": (0, 8)}, {"w": TensorSpec("w", "int16", (8,))}
    old, new = ({"w": np.full(8, value, np.uint16)} for value in (0, 1))
    shadow = Shadow.of(stream(specs, old, whole), "keep", 0)
    advance = cpu_diff.advance

    def interrupted(*arguments: Any) -> Any:
        if touched:
            advance(*arguments)
        raise KeyboardInterrupt

    with mock.patch.object(cpu_diff, "advance", interrupted), pytest.raises(KeyboardInterrupt):
        shadow.advance(stream(specs, new, whole), "keep", 0)
    shadow.retreat()
    if touched:
        with pytest.raises(CorruptDataError, match="An interrupt came while w was taken"):
            shadow.advance(stream(specs, new, whole), "keep", 0)
    else:
        assert shadow.advance(stream(specs, new, whole), "keep", 0)["w"].changed == 8
