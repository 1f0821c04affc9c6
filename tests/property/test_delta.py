"""Layouts, and deltas of whole models against a plain dictionary of what happens to each element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.tensors import Delta, Layout, Sparse, TensorSpec
from deltasync.tensors.delta import joined, merge
from tests import deltas
from tests import strategies as our

Model = dict[tuple[str, int], int]
"""Steps by tensor and flat index."""


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Several widths, whose tensors alternate; some are empty or scalars."""
    dtypes = draw(
        st.lists(
            st.sampled_from(["uint8", "bfloat16", "float16", "float32", "int64"]), min_size=1, max_size=7
        )
    )
    shapes = st.sampled_from([(), (0,), (1,), (2, 3), (3, 0)]) | st.tuples(st.integers(1, 30))
    return Layout(
        {f"{n}.{dtype}": TensorSpec(f"{n}.{dtype}", dtype, draw(shapes)) for n, dtype in enumerate(dtypes)}
    )


@st.composite
def states(draw: st.DrawFn, layout: Layout, least: int, most: int) -> list[dict[str, np.ndarray]]:
    """Consecutive bits of a model."""
    found = [
        {name: draw(our.bit_arrays(spec.dtype, spec.element_count)) for name, spec in layout.specs.items()}
    ]
    for _ in range(draw(st.integers(least, most)) - 1):
        following = st.sampled_from(found).map(
            lambda bits: {name: bits_N.copy() for name, bits_N in bits.items()}
        )
        if draw(st.booleans()):
            found.append(draw(following))
        else:
            found.append(
                {name: draw(our.new_bits(found[-1][name], spec.dtype)) for name, spec in layout.specs.items()}
            )
    return found


@st.composite
def histories(
    draw: st.DrawFn, least: int = 2, most: int = 5
) -> tuple[Layout, list[dict[str, np.ndarray]], list[Delta]]:
    """Consecutive bits, and the deltas between them."""
    layout = draw(layouts())
    bits = draw(states(layout, least, most))
    return layout, bits, [deltas.between(layout, old, new) for old, new in itertools.pairwise(bits)]


def model_of(delta: Delta) -> Model:
    """What a delta does, from its arrays by a search for each position."""
    found: Model = {}
    for width, (at_K, data_K) in delta.steps.items():
        specs = [spec for spec in delta.layout.specs.values() if spec.item_bytes == width]
        for at, value in zip(at_K.tolist(), data_K.tolist(), strict=True):
            for spec in specs:
                if at < spec.element_count:
                    break
                at -= spec.element_count
            assert (spec.name, at) not in found
            found[spec.name, at] = value
    return found


def model_merge(layout: Layout, models: list[Model]) -> Model:
    """Merge element by element, in Python's integers."""
    total: Model = {}
    for model in models:
        for place, value in model.items():
            total[place] = (total.get(place, 0) + value) % (1 << 8 * layout.specs[place[0]].item_bytes)
    return {place: step for place, step in total.items() if step}


def copied(delta: Delta) -> list[tuple[int, np.ndarray, np.ndarray]]:
    return [(width, at.copy(), data.copy()) for width, (at, data) in delta.steps.items()]


@given(layouts())
def test_a_layout_has_each_element_once_in_the_order_of_the_table(layout: Layout) -> None:
    assert list(layout.vectors) == sorted({spec.item_bytes for spec in layout.specs.values()})
    taken: dict[int, list[tuple[str, int]]] = {width: [] for width in layout.vectors}
    for name, spec in layout.specs.items():
        width, first, last = layout.span(name)
        assert (width, first, last - first) == (spec.item_bytes, len(taken[width]), spec.element_count)
        taken[width] += [(name, index) for index in range(spec.element_count)]
    for width, places in taken.items():
        vector = layout.vectors[width]
        assert vector.element_count == len(places)
        every = np.arange(len(places), dtype=vector.index_dtype)
        assert [vector.names[t] for t in vector.tensor(every).tolist()] == [name for name, _ in places]
    assert layout.element_count == sum(map(len, taken.values()))


@given(layouts(), st.data())
def test_counts_are_those_of_each_tensor(layout: Layout, data: st.DataObject) -> None:
    for vector in layout.vectors.values():
        few = data.draw(
            st.sets(st.integers(0, max(0, vector.element_count - 1)), max_size=vector.element_count)
        )
        at_K = np.array(sorted(few), vector.index_dtype)
        expected = [
            sum(first <= at < last for at in few)
            for first, last in itertools.pairwise(vector.first_T.tolist())
        ]
        assert vector.count(at_K).tolist() == expected


@given(histories(most=2))
def test_a_delta_tells_and_does_what_it_holds(history: tuple) -> None:
    layout, (old, new, *_), (delta, *_) = history
    deltas.check(delta)
    model = model_of(delta)
    assert delta.changed == len(model)
    assert delta.nbytes == sum(array.nbytes for _, *arrays in copied(delta) for array in arrays)
    expected = {name: sum(place[0] == name for place in model) for name in layout.specs}
    in_order = [name for vector in layout.vectors.values() for name in vector.names if expected[name]]
    assert list(delta.counts().items()) == [(name, expected[name]) for name in in_order]
    for name in layout.specs:
        steps = delta.of(name)
        found = {(name, i): v for i, v in zip(steps.at_K.tolist(), steps.data_K.tolist(), strict=True)}
        assert found == {place: item for place, item in model.items() if place[0] == name}
    reached = deltas.applied(delta, old)
    assert all(reached[name].tobytes() == new[name].tobytes() for name in layout.specs)


@given(histories())
def test_a_compaction_is_that_of_each_element(history: tuple) -> None:
    layout, bits, parts = history
    before = [copied(part) for part in parts]
    compacted = merge(parts)
    deltas.check(compacted)
    assert all((sparse.data_K != 0).all() for sparse in compacted.steps.values())
    assert all(steps.at_K.size for steps in compacted.steps.values())
    assert model_of(compacted) == model_merge(layout, [model_of(part) for part in parts])
    reached = deltas.applied(compacted, bits[0])
    assert all(reached[name].tobytes() == bits[-1][name].tobytes() for name in layout.specs)
    for arrays, part in zip(before, parts, strict=True):
        for (width, at_K, data_K), (_, at_now_K, data_now_K) in zip(arrays, copied(part), strict=True):
            np.testing.assert_array_equal(at_K, at_now_K, err_msg=str(width))
            np.testing.assert_array_equal(data_K, data_now_K, err_msg=str(width))


@given(histories())
def test_a_compaction_is_the_diff_of_first_and_last(history: tuple) -> None:
    layout, bits, parts = history
    assert model_of(merge(parts)) == model_of(deltas.between(layout, bits[0], bits[-1]))


@given(histories(least=4), st.data())
def test_compacting_does_not_depend_on_the_grouping(history: tuple, data: st.DataObject) -> None:
    _, _, parts = history
    expected = model_of(merge(parts))
    while len(parts) > 1:
        at = data.draw(st.integers(0, len(parts) - 2))
        parts = [*parts[:at], merge(parts[at : at + 2]), *parts[at + 2 :]]
    assert model_of(parts[0]) == expected


def negated(delta: Delta) -> Delta:
    return Delta(
        delta.layout,
        {width: Sparse(at_K, np.negative(step_K)) for width, (at_K, step_K) in delta.steps.items()},
    )


@given(histories())
def test_there_and_back_cancels_out(history: tuple) -> None:
    _, bits, parts = history
    delta = merge(parts)
    undone = negated(delta)
    deltas.check(undone)
    reached = deltas.applied(undone, bits[-1])
    assert all(reached[name].tobytes() == bits[0][name].tobytes() for name in bits[0])
    back = merge([delta, undone])
    assert (back.steps, back.changed) == ({}, 0)
    assert model_of(negated(undone)) == model_of(delta)


@given(histories(most=2), st.data())
def test_parts_are_joined_into_the_whole(history: tuple, data: st.DataObject) -> None:
    layout, _, (delta, *_) = history
    ranks = data.draw(st.integers(1, 4))
    random = np.random.default_rng(data.draw(our.seeds))
    by_range = data.draw(st.booleans())
    parts: list[dict[int, Sparse]] = [{} for _ in range(ranks)]
    for width, (at_K, data_K) in delta.steps.items():
        rank_K = random.integers(0, ranks, at_K.size)
        if by_range:
            rank_K.sort()
        for rank, part in enumerate(parts):
            if (rank_K == rank).any():
                part[width] = Sparse(at_K[rank_K == rank], data_K[rank_K == rank])
    found = [Delta(layout, part) for part in parts]
    found = [found[at] for at in data.draw(st.permutations(range(ranks)))]
    whole = joined(found)
    deltas.check(whole)
    assert model_of(whole) == model_of(delta)
    if delta.changed and ranks > 1:
        with pytest.raises(ValueError, match="twice"):
            joined([*found, next(part for part in found if part.changed)])


@given(histories(), st.integers(1, 40))
def test_pieces_end_where_tensors_end(history: tuple, most: int) -> None:
    _, _, parts = history
    delta = merge(parts)
    pieces = [*map(delta.part, delta.split(most))]
    assert bool(pieces) == bool(delta.changed)
    seen: set[str] = set()
    largest = max(delta.counts().values(), default=0)
    for piece in pieces:
        deltas.check(piece)
        assert 0 < piece.changed < most + largest
        assert not seen & piece.counts().keys(), "a tensor is in one piece"
        seen |= piece.counts().keys()
    for width, of in itertools.groupby(pieces, key=lambda piece: next(iter(piece.steps))):
        assert all(piece.changed >= most for piece in list(of)[:-1]), width
    if pieces:
        assert model_of(joined(pieces)) == model_of(delta)
        assert model_of(merge(pieces)) == model_of(delta)


def test_positions_past_int32() -> None:
    """Only what changes takes memory."""
    sizes = {"a": (1 << 31) - 2, "b": 0, "c": 5, "d": 1 << 32, "e": 3}
    layout = Layout({name: TensorSpec(name, "uint8", (size,)) for name, size in sizes.items()})
    vector = layout.vectors[1]
    assert vector.index_dtype == np.int64
    edge = (1 << 31) - 2
    at_K = np.array([0, edge - 1, edge, edge + 4, edge + 5, vector.element_count - 1])
    delta = Delta(layout, {1: Sparse(at_K, np.arange(1, 7, dtype=np.uint8))})
    assert delta.counts() == {"a": 2, "c": 2, "d": 1, "e": 1}
    assert {name: delta.of(name).at_K.tolist() for name in sizes} == {
        "a": [0, edge - 1],
        "b": [],
        "c": [0, 4],
        "d": [0],
        "e": [2],
    }
    assert [delta.part(piece).changed for piece in delta.split(1)] == [2, 2, 1, 1]
    bits_N = np.zeros(3, np.uint8)
    delta.apply("e", bits_N)
    assert bits_N.tolist() == [0, 0, 6]
    other = Delta(layout, {1: Sparse(at_K[3:], np.negative(np.arange(4, 7, dtype=np.uint8)))})
    compacted = merge([delta, other])
    assert compacted.steps[1].at_K.tolist() == at_K[:3].tolist() and compacted.steps[1].at_K.dtype == np.int64
    assert Layout({"a": layout.specs["a"]}).vectors[1].index_dtype == np.int32
