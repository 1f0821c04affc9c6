"""One shard against several, without processes: the same bits, changes and fingerprints, whatever the
ranges.
"""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync import codec
from deltasync.errors import ConfigError, ModelMismatchError
from deltasync.kernels import native
from deltasync.ops.steps import Steps
from deltasync.publish.detect import Difference
from deltasync.publish.ranges import Range
from deltasync.publish.shadow import Shadow
from deltasync.publish.snapshot import Snapshot
from deltasync.tensors import Delta, TensorSpec, fingerprint
from deltasync.tensors.bits import tensor_of
from deltasync.tensors.delta import joined, merge
from deltasync.trainer.source import check_coverage
from tests import deltas, strategies

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


def shadow_of(specs: dict[str, TensorSpec], bits: Bits, ranges: dict[str, Range]) -> Shadow:
    return Shadow(specs, ranges, {name: bits[name][slice(*ranges[name])].copy() for name in specs})


def compared(shadow: Shadow, bits: Bits) -> Difference:
    """Compare the ranges of a shadow with other bits of theirs."""
    held = [
        tensor_of(bits[n].copy(), spec).reshape(-1)[slice(*shadow.ranges[n])]
        for n, spec in shadow.specs.items()
    ]
    return shadow.compare(held, [*shadow.specs])


def taken(shadow: Shadow, bits: Bits) -> list[Delta]:
    """Compare, apply the difference, and return its pieces."""
    found = compared(shadow, bits)
    shadow.apply(found)
    return [piece for piece in found.pieces if isinstance(piece, Delta)]


def encoded(shadow: Shadow, delta: Delta, name: str) -> bytes:
    def new(tensor: str) -> tuple[np.ndarray, int]:
        return shadow.bits[tensor], shadow.ranges[tensor][0]

    with mock.patch("deltasync.codec.tiles.BLOCK", 32):
        return codec.get(name).encode(delta, new, dict.fromkeys(shadow.specs, 0), 2, 1).to_bytes()


@pytest.mark.parametrize("codec_name", ["packed", "context", "raw"])
@pytest.mark.parametrize("ranks", [2, 4, 16])
@given(data=st.data(), model=strategies.model_pairs())
def test_shards_add_up_to_the_whole(codec_name: str, ranks: int, data: st.DataObject, model: tuple) -> None:
    specs, old, new = model
    whole = {name: (0, spec.element_count) for name, spec in specs.items()}
    alone = shadow_of(specs, old, whole)
    changed = merge([Delta(alone.layout, {}), *taken(alone, new)])
    assert changed.counts() == deltas.between(alone.layout, old, new).counts()

    held = data.draw(cuts(specs, ranks))
    check_coverage(specs, held)
    found: list[Delta] = []
    sums = dict.fromkeys(specs, 0)
    for ranges in held:
        shadow = shadow_of(specs, old, ranges)
        changes = merge([Delta(shadow.layout, {}), *taken(shadow, new)])
        deltas.check(changes)

        def old_of_rank(name: str, ranges: dict[str, Range] = ranges) -> np.ndarray:
            old_N, (start, stop) = np.zeros_like(old[name]), ranges[name]
            old_N[start:stop] = old[name][start:stop]
            return old_N

        payload = codec.open_payload(encoded(shadow, changes, codec_name))
        found.append(codec.get(codec_name).decode(payload, shadow.layout, old_of_rank)[0])
        assert found[-1].counts() == changes.counts()
        for name, part in shadow.fingerprints.items():
            sums[name] = (sums[name] + part) & fingerprint.MASK
    together = joined(found)
    deltas.check(together)
    reached = deltas.applied(together, old)
    assert all(reached[name].tobytes() == new[name].tobytes() for name in specs)
    assert together.counts() == changed.counts()
    assert sums == alone.fingerprints


def _taken(snapshot: Snapshot, old: dict[str, np.ndarray], name: str) -> bytes:
    out_N = np.empty_like(old[name])
    snapshot.take(name, out_N)
    return out_N.tobytes()


@given(
    st.lists(st.sampled_from(["forth", "back", "given up"]), max_size=30), strategies.model_pairs(), st.data()
)
def test_a_snapshot_has_the_bits_of_its_moment(moves: list[str], model: tuple, data: st.DataObject) -> None:
    specs, old, new = model
    whole = {name: (0, spec.element_count) for name, spec in specs.items()}
    shadow = shadow_of(specs, old, whole)
    snapshot = Snapshot(shadow)
    left = data.draw(st.permutations(list(specs)))
    for move in moves:
        found = compared(shadow, old if move == "back" else new)
        if move != "given up":
            shadow.apply(found)
        if left and data.draw(st.booleans()):
            name = left.pop()
            assert _taken(snapshot, old, name) == old[name].tobytes()
    for name in left:
        assert _taken(snapshot, old, name) == old[name].tobytes()


@given(
    st.lists(st.sampled_from(["add", "mark", "freeze", "thaw"]), max_size=30),
    strategies.model_pairs(),
    st.data(),
)
def test_steps_add_up_to_the_difference_from_their_base(
    moves: list[str], model: tuple, data: st.DataObject
) -> None:
    specs, *bits = model
    ranges = data.draw(cuts(specs, 3))[1]
    shadow = shadow_of(specs, bits[0], ranges)
    steps, start, marked, version = Steps(shadow.layout, ranges, 1), bits[0], None, 1
    frozen: list[tuple[Steps, Bits]] = []

    def check(steps: Steps, first: Bits, last: Bits) -> None:
        expected = {
            name: bits_N[slice(*ranges[name])] - first[name][slice(*ranges[name])]
            for name, bits_N in last.items()
        }
        assert all(
            np.array_equal(steps.between(name, *ranges[name]), bits_N) for name, bits_N in expected.items()
        )
        found = joined([Delta(shadow.layout, {}), *steps.groups()])
        deltas.check(found)
        assert found.counts() == {
            name: count for name, each in expected.items() if (count := np.count_nonzero(each))
        }
        assert steps.estimated_bytes() >= 0

    for move in moves:
        if move == "add":
            version += 1
            steps.add(joined([Delta(shadow.layout, {}), *taken(shadow, bits[(version + 1) % 2])]))
        elif move == "mark":
            steps.mark(version)
            marked = version
        elif move == "freeze" and not frozen:
            frozen.append((steps.frozen(), bits[(version + 1) % 2]))
        elif move == "thaw" and frozen:
            check(frozen[0][0], start, frozen.pop()[1])
            steps.thaw()
            if marked is not None:
                steps.start(marked)
                start, marked = bits[(marked + 1) % 2], None
        check(steps, start, bits[(version + 1) % 2])


@given(data=st.data(), model=strategies.model_pairs())
def test_a_stream_that_is_only_compared_leaves_what_was_there(data: st.DataObject, model: tuple) -> None:
    specs, old, new = model
    ranges = data.draw(cuts(specs, 3))[1]
    shadow = shadow_of(specs, old, ranges)
    before = dict(shadow.fingerprints)
    compared(shadow, new)
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


@pytest.mark.parametrize("number", range(3))
def test_an_interrupt_while_a_stream_is_compared_leaves_the_shadow(number: int) -> None:
    """Of three calls, as tensors have three widths, any may be interrupted; snapshots keep the bits of
    before.
    """
    specs = {dtype: TensorSpec(dtype, dtype, (100,)) for dtype in ("int8", "int16", "float32")}
    random = np.random.default_rng(number)
    old = {name: np.frombuffer(random.bytes(spec.nbytes), spec.bits_dtype) for name, spec in specs.items()}
    new = {name: bits_N + np.asarray(1, bits_N.dtype) for name, bits_N in old.items()}
    whole = {name: (0, spec.element_count) for name, spec in specs.items()}
    shadow = shadow_of(specs, old, whole)
    before, snapshot = dict(shadow.fingerprints), Snapshot(shadow)
    calls, compare = itertools.count(), native.compare

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == number:
            raise KeyboardInterrupt
        return compare(*arguments)

    with mock.patch.object(native, "compare", interrupted), pytest.raises(KeyboardInterrupt):
        compared(shadow, new)
    assert shadow.fingerprints == before
    assert all(bits.tobytes() == old[name].tobytes() for name, bits in shadow.bits.items())
    assert all(_taken(snapshot, old, name) == old[name].tobytes() for name in list(specs)[:2])
    again = merge(taken(shadow, new))
    assert again.counts() == {name: spec.element_count for name, spec in specs.items()}
    assert all(bits.tobytes() == new[name].tobytes() for name, bits in shadow.bits.items())
    assert _taken(snapshot, old, "float32") == old["float32"].tobytes()
