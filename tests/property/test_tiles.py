from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltasync import codec
from deltasync.codec import reader, tiles
from deltasync.codec.base import Encoded, Payload, RangeBits
from deltasync.codec.tiles import Grid
from deltasync.errors import CorruptDataError, StageError
from deltasync.kernels import native
from deltasync.live import LiveMemory, Segment
from deltasync.tensors import Delta, Layout, Sparse, TensorSpec
from deltasync.tensors.bits import tensor_of
from tests import deltas

SHARDS = [(dim, ways) for dim in (-2, -1) for ways in (1, 2, 4, 8, 16)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)
    monkeypatch.setattr(tiles, "SMALL", 0)
    monkeypatch.setattr(tiles, "LEAST", 16)
    monkeypatch.setattr(tiles, "FEW", 0)


def changed(spec: TensorSpec, fraction: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Bits before and after; small numbers change by one step, as in training."""
    random = np.random.default_rng(seed)
    old_N = tensor_of(np.zeros(spec.element_count, spec.bits_dtype), spec)
    old_N = (
        (torch.from_numpy(random.standard_normal(spec.element_count)) * 0.02)
        .to(old_N.dtype)
        .view(torch.int16)
        .numpy()
        .view("u2")
    )
    new_N = old_N + (random.random(old_N.size) < fraction).astype("u2")
    return old_N, new_N


def encoded(
    spec: TensorSpec, old_N: np.ndarray, new_N: np.ndarray, start: int = 0, stop: int | None = None
) -> Payload:
    reached_N = old_N.copy()
    reached_N[start:stop] = new_N[start:stop]
    delta = deltas.between(Layout({spec.name: spec}), {spec.name: old_N}, {spec.name: reached_N})
    new = {spec.name: (new_N[start:stop], start)}
    return codec.open_payload(
        codec.get("context").encode(delta, new.__getitem__, {spec.name: 0}, 2, 1).to_bytes()
    )


def tiles_of(payload: Payload) -> dict[str, Any]:
    """What the metadata says of tensors that are coded by classes."""
    return json.loads(payload.metadata["vectors"])["2"]["tiles"]


def decoded(
    payload: Payload, spec: TensorSpec, old: codec.OldBits, wanted: codec.Wanted | None = None
) -> Delta:
    """The changes; none of `spec` has new bits instead of steps."""
    delta, digests = codec.get("context").decode(payload, Layout({spec.name: spec}), old, wanted)
    deltas.check(delta)
    assert digests == {spec.name: 0}
    return delta


def shard(spec: TensorSpec, old_N: np.ndarray, dim: int, ways: int, rank: int) -> LiveMemory:
    """What one of several workers holds of a tensor, in memory of its own."""
    whole = tensor_of(old_N, spec).view(torch.int16)
    size = spec.shape[dim] // ways
    part = whole.narrow(dim, rank * size, size)
    return LiveMemory(
        {spec.name: spec}, {spec.name: [Segment(part.contiguous(), part.stride(), part.storage_offset())]}
    )


@pytest.mark.parametrize(("dim", "ways"), SHARDS)
@pytest.mark.parametrize("shape", [(256, 128), (64, 512), (3, 64, 128)])
def test_every_even_shard_is_decoded_from_what_it_holds(shape: tuple[int, ...], dim: int, ways: int) -> None:
    spec = TensorSpec("w", "bfloat16", shape)
    old_N, new_N = changed(spec, 0.05)
    payload = encoded(spec, old_N, new_N)
    assert payload.arrays[".2.tiles"].shape == (256 * math.prod(shape[:-2]), 2) or tiles_of(payload)["planes"]
    reached_N = old_N.copy()
    for rank in range(ways):
        memory = shard(spec, old_N, dim, ways, rank)
        gathered_N = memory.gather("w")
        assert ways == 1 or not np.array_equal(gathered_N, old_N)
        delta = decoded(payload, spec, lambda _, bits_N=gathered_N: bits_N, memory.held)
        coordinate_K = np.unravel_index(delta.of("w").at_K, shape)[dim] // (shape[dim] // ways)
        assert (coordinate_K == rank).all()  # its share, and nothing else
        delta.apply("w", reached_N)
    np.testing.assert_array_equal(reached_N, new_N)


@pytest.mark.parametrize(("dim", "ways"), SHARDS)
@pytest.mark.parametrize("ranks", [1, 2, 8, 32])
def test_a_sharded_trainer_may_cut_in_another_way_than_its_replicas(ranks: int, dim: int, ways: int) -> None:
    spec = TensorSpec("w", "bfloat16", (256, 128))
    old_N, new_N = changed(spec, 0.05)
    size = old_N.size // ranks
    payloads = [encoded(spec, old_N, new_N, rank * size, (rank + 1) * size) for rank in range(ranks)]
    reached_N = old_N.copy()
    for payload, worker in itertools.product(payloads, range(ways)):
        memory = shard(spec, old_N, dim, ways, worker)
        decoded(payload, spec, memory.gather, memory.held).apply("w", reached_N)
    np.testing.assert_array_equal(reached_N, new_N)


class Watched(RangeBits):
    """Bits that note which ranges were read."""

    reads: ClassVar[list[tuple[int, int]]] = []

    def __getitem__(self, part: slice) -> np.ndarray:
        self.reads.append((part.start, part.stop))
        return super().__getitem__(part)


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 3 * 64 * 128), (64 * 128, 2 * 64 * 128), (64 * 128, 64 * 128 + 32 * 128)]
)
@pytest.mark.parametrize("bands", [1, 3, 1000])
def test_old_bits_are_read_by_a_few_bands_at_a_time(
    start: int, stop: int, bands: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, band = TensorSpec("w", "bfloat16", (3, 64, 128)), 4 * 128
    monkeypatch.setattr(reader, "_PART_BYTES", bands * band * 2 // native.threads(spec.element_count))
    monkeypatch.setattr(Watched, "reads", [])
    old_N, new_N = changed(spec, 0.05)
    payload = encoded(spec, old_N, new_N, start, stop)
    expected = np.flatnonzero(old_N[start:stop] != new_N[start:stop]) + start
    steps = Sparse(expected, new_N[expected] - old_N[expected])
    held = Watched(new_N[start:stop], start, spec.element_count, steps)
    found = decoded(payload, spec, lambda _: held).of("w")
    np.testing.assert_array_equal(found.at_K, expected)
    np.testing.assert_array_equal(found.data_K, steps.data_K)
    assert max(last - first for first, last in Watched.reads) <= min(bands * band, stop - start)
    assert sorted(Watched.reads) == Watched.reads and Watched.reads[-1][1] <= stop


def test_experts_are_decoded_by_who_holds_them() -> None:
    spec = TensorSpec("experts", "bfloat16", (4, 64, 128))
    old_N, new_N = changed(spec, 0.05)
    payload = encoded(spec, old_N, new_N)
    memory = shard(spec, old_N, -3, 4, 2)
    delta = decoded(payload, spec, memory.gather, memory.held)
    expected = np.flatnonzero(old_N != new_N)
    np.testing.assert_array_equal(delta.of("experts").at_K, expected[expected // (64 * 128) == 2])


@given(
    st.lists(st.integers(1, 4), max_size=1),
    st.integers(1, 40),
    st.integers(1, 40),
    st.data(),
    st.integers(0, 2**31),
)
def test_any_range_of_any_matrix_comes_back(
    lead: list[int], rows: int, columns: int, data: st.DataObject, seed: int
) -> None:
    spec = TensorSpec("w", "bfloat16", (*lead, rows, columns))
    old_N, new_N = changed(spec, 0.3, seed)
    unit = data.draw(st.sampled_from([1, columns, rows * columns]))
    start, stop = sorted(data.draw(st.lists(st.integers(0, old_N.size // unit), min_size=2, max_size=2)))
    start, stop = start * unit, stop * unit
    expected = np.flatnonzero(old_N[start:stop] != new_N[start:stop]) + start
    if not expected.size:
        return
    payload = encoded(spec, old_N, new_N, start, stop)
    known_N = np.zeros_like(old_N)
    known_N[start:stop] = old_N[start:stop]
    codec.get("context").decode(payload, Layout({"w": spec}), lambda _: known_N)[0].apply("w", old_N)
    np.testing.assert_array_equal(old_N[start:stop], new_N[start:stop])


@pytest.mark.parametrize(
    ("shape", "ways"),
    [
        ((4096, 4096), (16, 16)),
        ((3072, 1024), (8, 8)),
        ((151936, 1024), (16, 16)),
        ((128, 768, 2048), (8, 8)),
        ((50257, 768), (1, 16)),
        ((50257, 777), None),
        ((128, 128), (2, 2)),
        ((64, 63), (2, 1)),
        ((64, 64), (2, 2)),
        ((1 << 24,), None),
        ((), None),
        ((0, 4096), None),
    ],
)
def test_ways_follow_from_the_shape(
    shape: tuple[int, ...], ways: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    grid = Grid.fit(shape, 0, math.prod(shape), tiles.TILE)
    assert (None if grid is None else grid.ways) == ways
    assert grid is None or grid.elements * grid.count == math.prod(shape)


def memory_of(spec: TensorSpec, size: int, offset: int) -> LiveMemory:
    return LiveMemory({"w": spec}, {"w": [Segment(torch.zeros(size, dtype=torch.int16), (1,), offset)]})


@pytest.mark.parametrize(
    ("shape", "held"),
    [
        ((192, 192), lambda spec, old_N: shard(spec, old_N, -2, 3, 1)),
        ((192, 192), lambda spec, old_N: shard(spec, old_N, -1, 3, 1)),
        ((192, 192), lambda spec, old_N: shard(spec, old_N, -2, 32, 1)),
        ((128, 128), lambda spec, _: memory_of(spec, 200, 7)),  # no block of a matrix
        ((31, 37), lambda spec, _: memory_of(spec, 37, 0)),  # no tiles
    ],
)
def test_who_holds_a_part_of_a_tile_is_told_of_which_tensors(
    shape: tuple[int, ...], held: Callable[[TensorSpec, np.ndarray], LiveMemory]
) -> None:
    spec = TensorSpec("w", "bfloat16", shape)
    old_N, new_N = changed(spec, 0.05)
    memory, payload = held(spec, old_N), encoded(spec, old_N, new_N)
    with pytest.raises(StageError, match="more than is held of 1 tensors, such as w") as caught:
        decoded(payload, spec, memory.gather, memory.held)
    assert caught.value.tensors == ["w"]
    delta = decoded(payload, spec, lambda _: old_N, lambda _: None)
    delta.apply("w", old_N)
    np.testing.assert_array_equal(old_N, new_N)


@pytest.mark.parametrize("shape", [(128, 128), (31, 37)])
def test_who_holds_nothing_of_a_tensor_needs_nothing_of_it(shape: tuple[int, ...]) -> None:
    spec = TensorSpec("w", "bfloat16", shape)
    payload = encoded(spec, *changed(spec, 0.05))
    memory = LiveMemory({"w": spec}, {"w": []})
    delta = decoded(payload, spec, memory.gather, memory.held)
    assert delta.changed == 0


def test_who_holds_all_of_a_tensor_in_pieces_of_any_shape_decodes_it() -> None:
    spec = TensorSpec("w", "bfloat16", (128, 128))
    old_N, new_N = changed(spec, 0.05)
    live_N = torch.from_numpy(old_N.view("i2"))
    pieces = [
        Segment(live_N[start:stop], (1,), start) for start, stop in ((0, 200), (200, 777), (777, 128 * 128))
    ]
    memory = LiveMemory({"w": spec}, {"w": pieces})
    delta = decoded(encoded(spec, old_N, new_N), spec, memory.gather, memory.held)
    np.testing.assert_array_equal(delta.of("w").at_K, np.flatnonzero(old_N != new_N))


@pytest.mark.parametrize(("rule", "value"), [("FEW", 32), ("SMALL", 4096)])
def test_small_tensors_and_few_changes_are_coded_for_every_shard(
    rule: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, rule, value)
    monkeypatch.setattr(tiles, "TILE", 64 if rule == "FEW" else 1 << 14)
    monkeypatch.setattr(tiles, "LEAST", 1 << 12)
    spec = TensorSpec("w", "bfloat16", (63, 64) if rule == "SMALL" else (64, 64))
    old_N, new_N = changed(spec, 0.05)
    payload = encoded(spec, old_N, new_N)
    assert "tiles" not in json.loads(payload.metadata["vectors"])["2"]
    memory = LiveMemory({"w": spec}, {"w": [Segment(torch.zeros(100, dtype=torch.int16), (1,), 7)]})
    delta = decoded(payload, spec, memory.gather, memory.held)
    delta.apply("w", old_N)
    np.testing.assert_array_equal(old_N[7:107], new_N[7:107])


@pytest.mark.parametrize("size", ["0", "-1", "x", "", "1e3", str(1 << 31), "9" * 40])
def test_tiles_that_cannot_be_are_damage(size: str) -> None:
    spec = TensorSpec("w", "bfloat16", (128, 128))
    old_N, new_N = changed(spec, 0.05)
    payload = encoded(spec, old_N, new_N)
    payload.metadata["tile_elements"] = size  # type: ignore[index]
    with pytest.raises(CorruptDataError, match="tile_elements"):
        decoded(payload, spec, lambda _: old_N)


@pytest.mark.parametrize("range_", [[-1, 64], [64, 64], [0, 4097], [128, 64], [-(1 << 63), (1 << 63) - 1]])
def test_a_range_that_cannot_be_is_damage(range_: list[int]) -> None:
    spec = TensorSpec("w", "bfloat16", (64, 64))
    old_N, new_N = changed(spec, 0.3)
    payload = encoded(spec, old_N, new_N, 64, 128)
    assert payload.arrays[".2.ranges"].tolist() == [[64, 128]]
    payload.arrays[".2.ranges"] = np.array([range_])  # type: ignore[index]
    with pytest.raises(CorruptDataError, match="ranges"):
        decoded(payload, spec, lambda _: old_N)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"planes": planes} for planes in ([], [9, 9, 9, 9], {}, "x", ["1", 2, 3, 4], 7)),
        *({"groups": groups} for groups in ([], [1], [0, 0], [0, 999], "0", None, [0, 1.5])),
    ],
)
def test_a_table_of_blocks_that_cannot_be_is_damage(wrong: dict[str, Any]) -> None:
    spec = TensorSpec("w", "bfloat16", (64, 64))
    old_N, new_N = changed(spec, 0.3)
    payload = encoded(spec, old_N, new_N)
    vectors = json.loads(payload.metadata["vectors"])
    vectors["2"]["tiles"] |= wrong
    payload.metadata["vectors"] = json.dumps(vectors)  # type: ignore[index]
    with pytest.raises(CorruptDataError):
        decoded(payload, spec, lambda _: old_N)


@pytest.mark.parametrize(
    "bits", [np.zeros(100, np.uint16), np.zeros(4096, np.uint8), np.zeros(4096, np.float32)]
)
def test_old_bits_of_another_tensor_are_refused(bits: np.ndarray) -> None:
    spec = TensorSpec("w", "bfloat16", (64, 64))
    payload = encoded(spec, *changed(spec, 0.3))
    with pytest.raises(StageError, match="old bits of"):
        decoded(payload, spec, lambda _: bits)


TABLES = st.binary(max_size=40) | st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, 255)), min_size=1, max_size=5
).map(lambda rows: bytes([len(rows) - 1, *itertools.chain(*rows)]) + bytes([0, 128, 32]) * 2 * len(rows))


@given(TABLES, st.lists(st.integers(0, 2**32 - 1), max_size=6), st.integers(1, 40))
def test_any_classes_words_and_counts_are_damage_or_changes(
    tables: bytes, words: list[int], count: int
) -> None:
    spec = TensorSpec("w", "bfloat16", (8, 9))
    old_N = np.resize(np.array([0, 0x3F80, 0xBF81, 0x8000, 0x7FC1, 0x7F80, 0x1234], np.uint16), 72)
    row = {"tensor": 0, "tensors": 1, "tiles": {"groups": [0], "planes": None}}
    arrays = {
        ".2.counts": torch.tensor([count], dtype=torch.int32),
        ".2.fingerprints": torch.zeros(1, dtype=torch.int64),
        ".2.tiles": torch.tensor([[count, len(words)], [0, 0]], dtype=torch.int32),
        ".2.tile_tables": torch.from_numpy(np.frombuffer(bytearray(tables), np.uint8)),
        ".2.tile_words": torch.from_numpy(np.array(words, np.uint32).view(np.int32)),
    }
    extra = {"block_elements": "64", "tile_elements": "4", "vectors": json.dumps({"2": row})}
    data = Encoded.of("context", 2, 1, count, arrays, extra).to_bytes()
    with contextlib.suppress(CorruptDataError):
        assert decoded(codec.open_payload(data), spec, lambda _: old_N).changed == count


@pytest.mark.parametrize("most", [1 << 22, 10_000])
def test_one_table_of_tiles_serves_versions_and_payloads(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoders and readers make it once above any small number of tiles, unless it would be too large."""
    made, of = list[int](), tiles.Tiling.of
    monkeypatch.setattr(tiles.Tiling, "of", lambda vector, cuts: made.append(len(cuts)) or of(vector, cuts))
    monkeypatch.setattr(tiles, "_FEW_TILES", 1 << 10)
    monkeypatch.setattr(tiles, "_MOST_TILES", most)
    specs = {f"w{n}": TensorSpec(f"w{n}", "bfloat16", (32, 32)) for n in range(70)}  # 256 tiles each
    layout = Layout(specs)
    old = {name: changed(spec, 0.0, seed)[0] for seed, (name, spec) in enumerate(specs.items())}
    for names in ([*specs], [*specs][3:40], [*specs][69:]):  # a version, then two payloads of the next
        new = {name: bits_N + np.uint16(name in names) for name, bits_N in old.items()}
        delta = deltas.between(layout, old, new)
        payload = codec.open_payload(
            codec.get("context")
            .encode(delta, lambda name, new=new: (new[name], 0), dict.fromkeys(names, 0), 2, 1)
            .to_bytes()
        )
        found, _ = codec.get("context").decode(payload, layout, old.__getitem__)
        for written, read in zip(delta.steps[2], found.steps[2], strict=True):
            np.testing.assert_array_equal(written, read)
        old = new
    assert made == ([70] if most >= 70 * 256 else [70, 70, 37, 1])
