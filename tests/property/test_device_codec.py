"""Payloads of a delta in a device's memory: the same bytes as the host writes, and decoded there to the same
changes.

Triton's interpreter takes milliseconds for each change of the longest stream and for each program, so models
are tiny here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch

from deltasync import Publisher, Replica, codec, kernels, open_store
from deltasync.channel.documents import File
from deltasync.codec import classes, tables, tiles, vector
from deltasync.codec.base import Encoded, Payload
from deltasync.errors import CorruptDataError, StageError
from deltasync.gpu.delta import ALIGNED, BLOCK, DeviceBits, DeviceDelta, DeviceSparse
from deltasync.gpu.devices import RESERVE_BYTES, Device
from deltasync.kernels.backend import accelerator
from deltasync.live import Segment
from deltasync.publish import encode, log
from deltasync.stores import Store
from deltasync.tensors import Delta, Layout, TensorSpec
from deltasync.tensors.bits import bits_of, signed_view, tensor_of
from tests import deltas
from tests.devices import StandIn
from tests.interpreter import DEVICE, INTERPRETED, RUNS

if RUNS:
    from deltasync.gpu import codec as on_device
    from deltasync.gpu.encode import DeviceCoder

pytestmark = pytest.mark.skipif(not RUNS, reason="needs a GPU or Triton's interpreter")

CODECS = ("packed", "context")
SHAPES = {
    "bfloat16": [(12, 10), (3,), (0,), (2, 4, 6), (1,)],
    "float8_e5m2": [(8, 6)],
    "float32": [(8, 6), (7,)],
    "int64": [(6, 8)],
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, tiles, groups and batches in a few hundred elements."""
    monkeypatch.setattr(tiles, "BLOCK", 97)
    monkeypatch.setattr(vector, "GROUP_CHANGED", 20)
    for name, value in {"TILE": 40, "SMALL": 60, "LEAST": 40, "FEW": 1}.items():
        monkeypatch.setattr(tiles, name, value)
    if RUNS:
        from deltasync.gpu import classes as gpu_classes

        monkeypatch.setattr(gpu_classes, "MOST_BYTES", 200)
        monkeypatch.setattr(on_device, "MOST_CHANGED", 60)


@dataclasses.dataclass
class Case:
    """A model before and after a step."""

    layout: Layout
    old: dict[str, np.ndarray]
    new: dict[str, np.ndarray]

    @property
    def delta(self) -> Delta:
        return deltas.between(self.layout, self.old, self.new)

    @property
    def digests(self) -> dict[int, np.ndarray]:
        found = deltas.digests(self.new)
        return {
            w: np.array([found[name] for name in of.names], np.uint64)
            for w, of in self.layout.vectors.items()
        }

    def there(self, are_new: bool = True) -> DeviceDelta:
        """The delta and the bits on the device, in buffers with gaps."""
        steps, bits = dict[int, DeviceSparse](), dict[int, DeviceBits]()
        for width, of in self.layout.vectors.items():
            count_T = np.diff(of.first_T)
            place_T = np.cumsum(-(-count_T // ALIGNED) * ALIGNED) - -(-count_T // ALIGNED) * ALIGNED
            room = np.full(int((-(-count_T // ALIGNED) * ALIGNED).sum()), 85, f"i{width}")
            for name, place, count in zip(of.names, place_T, count_T, strict=True):
                room[place : place + count] = (self.new if are_new else self.old)[name].view(f"i{width}")
            runs = np.stack((of.first_T[:-1], count_T, place_T), axis=1)
            bits[width] = DeviceBits(torch.from_numpy(room).to(DEVICE), runs)
            if width in self.delta.steps:
                at_K, step_K = self.delta.steps[width]
                base_B = np.unique(np.concatenate([np.arange(*edges, BLOCK) for edges in _pairs(of.first_T)]))
                bound_B = np.append(np.searchsorted(at_K, base_B), at_K.size)
                arrays = at_K.astype(np.int32), step_K.view(f"i{width}"), base_B, bound_B
                steps[width] = DeviceSparse(
                    *(torch.from_numpy(each).to(DEVICE) for each in arrays), of.count(at_K)
                )
        return DeviceDelta(self.layout, steps, bits)

    def encoded(self, name: str, most: int) -> list[Encoded]:
        """What the host writes."""
        of = deltas.digests(self.new)
        return [
            codec.get(name).encode(part, lambda tensor: (self.new[tensor], 0), of, 8, 7)
            for part in map(self.delta.part, self.delta.split(most))
        ]


def _pairs(edges: np.ndarray) -> Iterator[tuple[int, int]]:
    return zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)


def case(fraction: float, shapes: dict[str, list[tuple[int, ...]]] = SHAPES, seed: int = 0) -> Case:
    """Weights and a step that changes small ones rather than large ones, by small steps and a few of any
    size.
    """
    random, specs, old, new = np.random.default_rng(seed), dict[str, TensorSpec](), {}, {}
    for number in range(max(map(len, shapes.values()))):
        for dtype, of in shapes.items():
            if number < len(of):
                spec = TensorSpec(f"{dtype}.{number}", dtype, of[number])
                values = random.standard_normal(spec.element_count) * (100 if dtype == "int64" else 0.05)
                before = bits_of(torch.from_numpy(values).to(getattr(torch, dtype)))
                step = random.choice(np.array([1, -1, 1, -1, 2, -3, 7], f"i{before.itemsize}"), before.size)
                wild = random.random(before.size) < 0.02
                step[wild] = np.frombuffer(random.bytes(before.nbytes), step.dtype)[wild] | 1
                likely = np.minimum(
                    1, fraction * 2 * np.exp(-np.abs(values) / np.abs(values).mean() if before.size else 0)
                )
                moves = random.random(before.size) < (likely if fraction < 1 else 1)
                specs[spec.name], old[spec.name] = spec, before
                new[spec.name] = np.where(moves, before + step.view(before.dtype), before)
    return Case(Layout(specs), old, new)


def _written(made: Case, name: str, most: int) -> tuple[list[bytes], DeviceDelta]:
    there = made.there()
    pieces = list(there.split(most))
    found = [each.to_bytes() for each in _codec(made).encode(name, there, made.digests, 8, 7, pieces)]
    return found, there


@pytest.mark.parametrize("name", CODECS)
def test_a_device_writes_the_hosts_bytes_and_reads_them(name: str) -> None:
    made = case(0.12)
    found, there = _written(made, name, 16)
    assert found == [each.to_bytes() for each in made.encoded(name, 16)]
    assert len(found) >= 2
    _prove(name, there, made.digests, found)
    other = dict(made.digests)
    other[2] = other[2] + np.uint64(1)
    with pytest.raises(CorruptDataError):
        _prove(name, there, other, found)
    with pytest.raises(CorruptDataError):  # which makes other changes, in other blocks
        _prove(name, case(0.12, seed=1).there(), made.digests, found)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    ("fraction", "shapes"), [(1.0, [(6, 8)]), (0.3, [(1,)] * 9), (0.02, [(9, 30)])], ids=str
)
def test_all_few_and_tiny(name: str, fraction: float, shapes: list[tuple[int, ...]]) -> None:
    made = case(fraction, {"bfloat16": shapes}, seed=3)
    found, there = _written(made, name, 10**6)
    assert found == [each.to_bytes() for each in made.encoded(name, 10**6)]
    _prove(name, there, made.digests, found)


def _prove(name: str, there: DeviceDelta, digests: dict[int, np.ndarray], files: list[bytes]) -> None:
    record = encode.record_of(name, 8, 7, there.changed)
    DeviceCoder(there.layout, next(iter(there.bits.values())).bits_N.device).prove(
        record, there, digests, [(str(number), data) for number, data in enumerate(files)]
    )


QWEN3 = [(160, 1024), (1024,), (32, 1024), (128,), (32, 3072), (1024,)]
"""A Qwen3-0.6B: embedding (151,936 rows), norms, projections, with as many tiles, of as many columns, but
fewer rows.
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["context"] if INTERPRETED else CODECS)  # which has tiles
def test_tiles_as_a_real_model_has_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 by 16 tiles of 64 columns, so that chunks have two rows; 8 by 8 of 128 and 384; vectors by gaps
    between them.
    """
    monkeypatch.setattr(tiles, "BLOCK", 1 << 12)
    monkeypatch.setattr(vector, "GROUP_CHANGED", 600)
    for constant, value in {"TILE": 1 << 9, "SMALL": 4 << 9, "LEAST": 1 << 8, "FEW": 3}.items():
        monkeypatch.setattr(tiles, constant, value)
    from deltasync.gpu import classes as gpu_classes

    monkeypatch.setattr(gpu_classes, "MOST_BYTES", 40_000)
    monkeypatch.setattr(on_device, "MOST_CHANGED", 2500)
    made = case(0.012, {"bfloat16": QWEN3}, seed=11)
    found, there = _written(made, name, 1200)
    assert found == [each.to_bytes() for each in made.encoded(name, 1200)]
    assert len(found) >= 3
    if name == "context":
        tiling = tiles.tiling(made.layout.vectors[2], tiles.whole(made.layout.vectors[2]))
        assert tiling.count_T.tolist() == [256, 0, 64, 0, 64, 0]
    _prove(name, there, made.digests, found)
    before = made.there(are_new=False)
    places = {2: on_device.BitAddresses.of(made.layout.vectors[2], before.bits[2])}
    opened = [codec.open_payload(data) for data in found]
    steps = _codec(made).decode(opened, places)[0].steps[2]
    assert torch.equal(steps.low_K, there.steps[2].low_K)
    assert torch.equal(steps.step_K.view(torch.int16), there.steps[2].step_K)


@pytest.mark.parametrize("name", CODECS)
def test_groups_classes_and_tables_are_the_writers_choice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer's bytes decode to the same changes, on a device and on the host."""
    made = case(0.1, {"bfloat16": [(10, 9)]}, seed=5)
    there = made.there(are_new=False)
    places = {2: on_device.BitAddresses.of(made.layout.vectors[2], there.bits[2])}
    (ours,) = made.encoded(name, 10**6)
    fit = tables.fit
    monkeypatch.setattr(vector, "GROUP_CHANGED", 7)
    monkeypatch.setattr(classes, "COSTS", (30.0, 1.0, 0.0))
    monkeypatch.setattr(tables, "fit", lambda count_TS: fit(count_TS + 1))
    (others,) = made.encoded(name, 10**6)
    entry = ".2.tables" if name == "packed" else ".2.tile_tables"
    assert not torch.equal(ours.arrays[entry], others.arrays[entry])
    found = [codec.open_payload(each.to_bytes()) for each in (ours, others)]
    changes = _read_by_the_host(made, found[0])
    assert _read(made, found[1], places) == changes == _read_by_the_host(made, found[1])


@pytest.mark.parametrize("name", CODECS)
def test_words_of_a_stranger_end_where_the_host_ends(name: str) -> None:
    made = case(0.2, {"bfloat16": [(10, 9)]}, seed=5)
    there = made.there(are_new=False)
    places = {2: on_device.BitAddresses.of(made.layout.vectors[2], there.bits[2])}
    (encoded,) = made.encoded(name, 10**6)
    entry = ".2.words" if name == "packed" else ".2.tile_words"
    random = np.random.default_rng(1)
    for _ in range(3):
        words = encoded.arrays[entry].clone()
        words[int(random.integers(words.numel()))] ^= int(random.integers(1, 1 << 31))
        payload = codec.open_payload(
            dataclasses.replace(encoded, arrays=encoded.arrays | {entry: words}).to_bytes()
        )
        assert _read(made, payload, places) == _read_by_the_host(made, payload)


@pytest.mark.parametrize("name", CODECS)
def test_a_publisher_whose_shadow_is_there_encodes_and_proves_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "ACCELERATORS", {"cuda", "cpu"})
    store = open_store(f"memory://{uuid.uuid4().hex}")
    made = case(0.2, {"bfloat16": [(8, 9), (4,)]}, seed=7)
    states = [
        {of: tensor_of(bits[of].copy(), spec).to(DEVICE) for of, spec in made.layout.specs.items()}
        for bits in (made.old, made.new)
    ]
    on_host = mock.patch.object(encode, "encode", side_effect=AssertionError("encoded on the host"))
    with on_host, Publisher(store, codec=name, shadow="device", dtype="keep") as publisher:
        for state in states:
            publisher.publish(state.items()).wait(300)
    replica = Replica(store)
    assert replica.sync() == 2
    for of, tensor in replica.state_dict().items():
        np.testing.assert_array_equal(bits_of(tensor), made.new[of])


@pytest.mark.parametrize("step", ["encode", "prove"])
def test_a_publisher_whose_device_has_no_room_encodes_on_the_host(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the device has put by then stays where it is: no key gets two contents."""
    monkeypatch.setattr(kernels, "ACCELERATORS", {"cuda", "cpu"})
    monkeypatch.setattr(encode, "GROUP_CHANGED", 10)
    monkeypatch.setattr(encode, "INLINE_BYTES", 0)
    put, keys = log.put_file, list[str]()

    def noted(store: Store, key: str, data: bytes) -> File:
        keys.append(key)
        return put(store, key, data)

    monkeypatch.setattr(log, "put_file", noted)
    store = open_store(f"memory://{uuid.uuid4().hex}")
    made = case(0.2, {"bfloat16": [(8, 9), (4, 5)]}, seed=7)
    states = [
        {of: tensor_of(bits[of].copy(), spec).to(DEVICE) for of, spec in made.layout.specs.items()}
        for bits in (made.old, made.new)
    ]
    device = accelerator(next(iter(states[0].values())).device)
    with Publisher(store, codec="packed", shadow="device", dtype="keep") as publisher:
        publisher.publish(states[0].items()).wait(300)
        if step == "prove":
            monkeypatch.setattr(DeviceCoder, "prove", mock.Mock(side_effect=StageError("No room.")))
        else:
            monkeypatch.setattr(type(device), "free_bytes", lambda _: RESERVE_BYTES + 10)
        publisher.publish(states[1].items()).wait(300)
    parts = [key for key in keys if key.startswith("parts/")]
    assert len(set(parts)) == len(parts) == (4 if step == "prove" else 2)
    replica = Replica(store)
    assert replica.sync() == 2
    for of, tensor in replica.state_dict().items():
        np.testing.assert_array_equal(bits_of(tensor), made.new[of])


@pytest.mark.parametrize("name", CODECS)
def test_what_does_not_fit_is_refused_before_it_is_allocated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And left to the host: the function that decodes returns None then."""
    made = case(0.2, {"bfloat16": [(8, 9), (4,)]}, seed=7)
    there = made.there(are_new=False)
    places = {2: on_device.BitAddresses.of(made.layout.vectors[2], there.bits[2])}
    (encoded,) = made.encoded(name, 10**6)
    payload, full = codec.open_payload(encoded.to_bytes()), StandIn(free_bytes=RESERVE_BYTES + 10)
    coder = on_device.DeviceCodec(made.layout, full.device, full.send, full.check_room)
    delta = made.there()
    for allocates in ("empty", "zeros"):
        monkeypatch.setattr(torch, allocates, lambda *sizes, **options: pytest.fail("allocated"))
    with pytest.raises(StageError):
        coder.decode([payload], places)
    with pytest.raises(StageError):
        next(coder.encode(name, delta, made.digests, 8, 7, [*delta.split(10**6)]))
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "ACCELERATORS", {"cuda", "cpu"})
    held = {of: [Segment(signed_view(bits_N), (1,), 0)] for of, bits_N in made.old.items()}
    read = full.decoder(made.layout, held)
    assert read is not None and read([payload]) is None
    read = StandIn().decoder(made.layout, held)
    assert read is not None and (found := read([payload])) is not None
    assert found.delta.changed == made.delta.changed
    assert read([payload, payload]) is None  # as where ranks of a trainer have each written a part


def test_an_error_leaves_no_work_on_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    coder = DeviceCoder(case(0.2).layout, torch.device("cpu"))
    coder._there = StandIn()
    for name, value in {"_is_cuda": True, "_stream": (stream := mock.Mock())}.items():
        monkeypatch.setattr(StandIn, name, value)
    monkeypatch.setattr(StandIn, "staging", Device.staging)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    with pytest.raises(MemoryError), coder.after(None):
        raise MemoryError
    stream.synchronize.assert_called_once_with()


def _codec(made: Case) -> on_device.DeviceCodec:
    device = accelerator(torch.device(DEVICE, *[0] * (DEVICE == "cuda")))
    return on_device.DeviceCodec(made.layout, device.device, device.send)


def _read(made: Case, payload: Payload, places: dict[int, on_device.BitAddresses]) -> object:
    try:
        found = _codec(made).decode([payload], places)[0].steps[2]
    except CorruptDataError:
        return None
    return found.low_K.tolist(), found.step_K.cpu().view(torch.int16).tolist()


def _read_by_the_host(made: Case, payload: Payload) -> object:
    try:
        delta, _ = codec.get(payload.codec).decode(payload, made.layout, made.old.__getitem__)
    except CorruptDataError:
        return None
    at_K, step_K = delta.steps[2]
    return at_K.tolist(), step_K.view(np.int16).tolist()


@pytest.mark.parametrize("columns", [16, 13])  # read in units of eight elements, and one by one
@pytest.mark.parametrize("classes", [3, 20, 256])
def test_a_device_counts_the_elements_of_each_class_in_chunks_and_spans(columns: int, classes: int) -> None:
    """In two groups of blocks, in which some values may be of no class."""
    from deltasync.gpu.classes import CHUNK, SPAN, BlockBits
    from deltasync.kernels.rans import Classes

    blocks, rows, stride = 3, 325, columns + 24  # three spans each
    bits_N = torch.from_numpy(
        np.random.default_rng(2).integers(0, 1 << 16, blocks * rows * stride, np.uint16)
    )
    bits_N = bits_N.to(DEVICE)
    first_B = np.arange(blocks) * rows * stride
    row_BF = np.array([[bits_N.data_ptr() + 2 * of, columns, stride, rows, of, 7, 255] for of in first_B])
    band_GF = np.array([[of, stride, columns, 1, rows, b] for b, of in enumerate(first_B)])
    value_C = np.arange(classes) if classes == 256 else np.arange(classes) * 5
    line_C3 = np.stack((value_C, value_C + (0 if classes == 256 else 3), value_C % 7), axis=1)
    of_classes = Classes.of([line_C3, line_C3[:2]])
    blocks_ = BlockBits(row_BF, band_GF, np.zeros(blocks + 1, np.int64), 2, bits_N.device)
    blocks_.divide(np.array([0, 0, 1]), of_classes)
    blocks_.measure()
    sizes = blocks_.size_P.tolist()
    found = zip(*(blocks_.counts(batch) for batch in blocks_.batches), strict=True)
    count_N, before_N, *_ = (torch.cat(arrays) for arrays in found)
    assert blocks_.size_P.tolist() == sizes
    wanted, before, spans = list[int](), list[int](), -(-rows * columns // (CHUNK * SPAN))
    for b, group in enumerate((0, 0, 1)):
        held = bits_N.cpu().numpy().reshape(blocks, rows, stride)[b, :, :columns].reshape(-1) >> 7 & 255
        low_C, span_C, *_ = of_classes.group(group)
        for low, span in zip(low_C.astype(int), span_C, strict=True):
            is_of = (held >= low) & (held <= low + span)
            wanted += np.add.reduceat(is_of, np.arange(0, is_of.size, CHUNK), dtype=int).tolist()
            wanted += [0] * (-len(wanted) % SPAN)
            before += [int(is_of[: of * CHUNK * SPAN].sum()) for of in range(spans)]
    assert count_N.tolist() == wanted
    assert before_N.tolist() == before
    assert sizes == np.add.reduceat(np.array(wanted), np.arange(0, len(wanted), spans * SPAN)).tolist()
