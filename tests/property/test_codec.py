from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from deltasync import codec
from deltasync.codec import tiles, vector
from deltasync.codec.base import Encoded, body
from deltasync.errors import CorruptDataError, FormatError, ModelMismatchError, StageError
from deltasync.tensors import Delta, Layout, Region, Sparse, TensorSpec
from deltasync.tensors.bits import bits_of, tensor_of
from tests import deltas
from tests import strategies as our

Model = tuple[dict[str, TensorSpec], dict[str, np.ndarray], dict[str, np.ndarray]]

CODECS = pytest.mark.parametrize("codec_name", ["raw", "packed", "context"])
BLOCK_CODECS = pytest.mark.parametrize("codec_name", ["packed", "context"])


@pytest.fixture(params=[1, 7, 64, 1 << 20], ids="block={}".format, scope="module")
def block_elements(request: pytest.FixtureRequest) -> Iterator[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "BLOCK", request.param)
        patch.setattr(vector, "GROUP_CHANGED", 100)
        _small(patch, request.param)
        yield request.param


def _small(patch: pytest.MonkeyPatch, tile_elements: int) -> None:
    """Tiles of few elements and few changes, so that small matrices have some, and no tensor is coded by gaps
    instead.
    """
    patch.setattr(tiles, "TILE", tile_elements)
    patch.setattr(tiles, "SMALL", 0)
    patch.setattr(tiles, "LEAST", 0)
    patch.setattr(tiles, "FEW", 0)


def _encoded(codec_name: str, model: Model) -> Encoded:
    return deltas.encode(codec_name, *model)


def _encode(codec_name: str, model: Model) -> bytes:
    return _encoded(codec_name, model).to_bytes()


def _changed(model: Model) -> list[str]:
    specs, old, new = model
    names = [name for vector in Layout(specs).vectors.values() for name in vector.names]
    return [name for name in names if (old[name] != new[name]).any()]


def _assert_leads_from_old_to_new(data: bytes, model: Model) -> None:
    specs, old, new = model
    payload = codec.open_payload(data)
    assert (payload.version, payload.base_version) == (8, 7)
    assert payload.changed == sum(int((old[name] != new[name]).sum()) for name in specs)
    delta, fingerprints = deltas.decode(data, specs, old)
    deltas.check(delta)
    reached = deltas.applied(delta, old)
    for name in specs:
        np.testing.assert_array_equal(reached[name], new[name], err_msg=name)
    assert sorted(fingerprints) == sorted(_changed(model))
    assert fingerprints == {
        name: digest for name, digest in deltas.digests(new).items() if name in fingerprints
    }


@given(our.model_pairs())
def test_raw_round_trip(model: Model) -> None:
    _assert_leads_from_old_to_new(_encode("raw", model), model)


@BLOCK_CODECS
@given(model=our.model_pairs())
def test_round_trip_in_blocks_of_any_size(codec_name: str, block_elements: int, model: Model) -> None:
    _assert_leads_from_old_to_new(_encode(codec_name, model), model)


def _like_training(dtype: str, element_count: int, density: float) -> Model:
    """Changes by a few steps, more of them where the exponent is small."""
    random = np.random.default_rng(0)
    values = torch.from_numpy(random.standard_t(5, element_count)) * (20 if dtype in our.INTEGERS else 0.02)
    old_N = bits_of(values.to(getattr(torch, dtype)))
    weight_N = 1 / np.maximum(np.abs(values.numpy()), 1e-3)
    probability_N = np.minimum(weight_N * (density / weight_N.mean()), 1.0)
    step_N = random.choice(np.array([1, 1, -1, -1, 2, -2, 7], f"i{old_N.itemsize}"), element_count).view(
        old_N.dtype
    )
    new_N = np.where(random.random(element_count) < probability_N, old_N + step_N, old_N)
    return {"w": TensorSpec("w", dtype, (element_count,))}, {"w": old_N}, {"w": new_N}


@BLOCK_CODECS
@pytest.mark.parametrize("density", [1e-5, 1e-3, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_round_trip_at_every_density(codec_name: str, density: float, dtype: str) -> None:
    model = _like_training(dtype, (1 << 19) + 12_345, density)
    _assert_leads_from_old_to_new(_encode(codec_name, model), model)


@BLOCK_CODECS
@pytest.mark.parametrize("dtype", our.DTYPES)
def test_round_trip_of_every_dtype(codec_name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _small(monkeypatch, tiles.TILE)
    model = _like_training(dtype, 40_000, 0.05)
    _assert_leads_from_old_to_new(_encode(codec_name, model), model)


@BLOCK_CODECS
def test_a_single_change_anywhere_in_a_large_tensor(codec_name: str) -> None:
    old_N = np.zeros(2_000_000, np.uint8)
    for index in (0, (1 << 19) - 1, 1 << 19, old_N.size - 1):
        new_N = old_N.copy()
        new_N[index] = 0x80
        model = ({"w": TensorSpec("w", "float8_e5m2", (2000, 1000))}, {"w": old_N}, {"w": new_N})
        data = _encode(codec_name, model)
        _assert_leads_from_old_to_new(data, model)
        assert len(data) < 1000


@BLOCK_CODECS
@pytest.mark.parametrize("density", [1e-3, 0.01, 0.1, 0.5])
def test_size_is_near_the_entropy(codec_name: str, density: float) -> None:
    model = _like_training("bfloat16", 1 << 20, density)
    old_N, new_N = model[1]["w"], model[2]["w"]
    class_N = (old_N >> 7 & 0xFF) if codec_name == "context" else np.zeros(old_N.size, np.uint16)
    bound_bits = 0.0
    for c in np.unique(class_N):
        step_N = (new_N - old_N)[class_N == c]
        _, count = np.unique(step_N, return_counts=True)  # unchanged elements are the step 0
        bound_bits -= float((count * np.log2(count / count.sum())).sum())
    assert 8 * len(_encode(codec_name, model)) < (1.02 if density < 0.5 else 1.04) * bound_bits + 8 * 1000


@BLOCK_CODECS
@pytest.mark.parametrize("seed", range(4))
def test_damaged_streams_never_crash(codec_name: str, seed: int) -> None:
    model = _like_training("bfloat16", 3000, 0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "BLOCK", 500)
        _small(patch, 1 << 20)
        data = _encode(codec_name, model)
        _assert_damage_is_refused(codec_name, data, model, seed)


def _assert_damage_is_refused(codec_name: str, data: bytes, model: Model, seed: int) -> None:
    body = 8 + int.from_bytes(data[:8], "little")
    random = np.random.default_rng(seed)
    refused = 0
    for _ in range(500):
        damaged = bytearray(data)
        for _ in range(random.integers(1, 4)):
            damaged[random.integers(body, len(data))] = random.integers(256)
        try:
            delta, _ = deltas.decode(bytes(damaged), model[0], model[1])
        except CorruptDataError:
            refused += 1
            continue
        deltas.check(delta)
        assert (delta.of("w").data_K != 0).all()
    assert refused > 450


@given(model=our.model_pairs(), data=st.data())
def test_a_shard_is_decoded_from_its_blocks_alone(
    block_elements: int, model: Model, data: st.DataObject
) -> None:
    specs, old, _ = model
    regions: dict[str, list[Region] | None] = {}
    for name, spec in specs.items():
        edge = st.integers(0, spec.element_count)
        pairs = data.draw(st.one_of(st.none(), st.lists(st.tuples(edge, edge).map(sorted), max_size=3)))
        regions[name] = None if pairs is None else [(low, ((high - low, 1),)) for low, high in pairs]
    data_ = _encode("packed", model)
    part, _ = deltas.decode(data_, specs, old, regions.__getitem__)
    every, digests = deltas.decode(data_, specs, old)
    deltas.check(part)
    for width, held in every.layout.vectors.items():
        inside, touched = np.zeros((2, held.element_count), bool)
        for name in set(held.names) & digests.keys():
            _, first, last = every.layout.span(name)
            wanted = regions[name]
            spans = (
                [(0, last - first)] if wanted is None else [(low, low + size) for low, ((size, _),) in wanted]
            )
            for low, high in spans:
                inside[first + low : first + high] = True
        for block in range(0, inside.size, block_elements):
            touched[block : block + block_elements] = inside[block : block + block_elements].any()
        if width in every.steps:
            at_K, step_K = every.steps[width]
            found = part.steps.get(width, (at_K[:0], step_K[:0]))
            np.testing.assert_array_equal(found[0], at_K[touched[at_K]])
            np.testing.assert_array_equal(found[1], step_K[touched[at_K]])


VECTORS = [
    "",
    "[]",
    "{",
    "[" * 100_000,
    '{"2": null}',
    '{"2": []}',
    '{"2": {}}',
    '{"3": {}}',
    '{"-2": {}}',
    '{"\u0662": {}}',
    '{"' + "2" * 5000 + '": {}}',
    '{"w": {}}',
]
ROW = {"tensor": 0, "tensors": 1, "block": 0, "blocks": 3, "planes": None}
WRONG = [
    *(
        {key: wrong}
        for key in ("tensor", "tensors", "block", "blocks")
        for wrong in (-1, 1.0, "1", None, True, 1 << 70, 9)
    ),
    *({"planes": wrong} for wrong in ([], [1], "x", 7, {}, [1 << 70] * 4, [-1, 1, 1, 1], True)),
    *(
        {"groups": wrong}
        for wrong in ([], [1], [0, 0], [0, 9], [0, -1], "0", None, {}, [0, "1"], [0, 1.5], [0] * 999)
    ),
]


@pytest.fixture(scope="module")
def payload_of_three_blocks() -> Iterator[tuple[Encoded, Model]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "BLOCK", 500)
        model = _like_training("bfloat16", 1400, 0.2)
        yield _encoded("packed", model), model


@pytest.mark.parametrize("text", VECTORS, ids=lambda text: text[:12] or "none")
def test_tables_of_packed_that_are_none_are_damage(
    payload_of_three_blocks: tuple[Encoded, Model], text: str
) -> None:
    encoded, model = payload_of_three_blocks
    with pytest.raises(CorruptDataError):
        deltas.decode(b"".join(body(encoded.arrays, encoded.metadata | {"vectors": text})), model[0])


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:40])
def test_numbers_of_packed_that_cannot_be_are_damage(
    payload_of_three_blocks: tuple[Encoded, Model], wrong: dict[str, object]
) -> None:
    encoded, model = payload_of_three_blocks
    rows = json.loads(encoded.metadata["vectors"])
    assert rows["2"] == ROW | {"groups": rows["2"].get("groups"), "planes": rows["2"]["planes"]}
    _assert_leads_from_old_to_new(b"".join(body(encoded.arrays, encoded.metadata)), model)
    text = json.dumps({"2": rows["2"] | wrong})
    with pytest.raises(CorruptDataError):
        deltas.decode(b"".join(body(encoded.arrays, encoded.metadata | {"vectors": text})), model[0])


@pytest.mark.parametrize("entry", ["counts", "fingerprints", "blocks", "tables", "words"])
@pytest.mark.parametrize("change", ["missing", "shorter", "longer", "another dtype"])
def test_entries_of_packed_that_cannot_be_are_damage(
    payload_of_three_blocks: tuple[Encoded, Model], entry: str, change: str
) -> None:
    encoded, model = payload_of_three_blocks
    arrays = dict(encoded.arrays)
    array = arrays.pop(f".2.{entry}").reshape(-1)
    if change != "missing":
        longer = torch.cat([array, array[:1]])
        changed = {"shorter": array[:-1], "longer": longer, "another dtype": array.to(torch.float64)}[change]
        arrays[f".2.{entry}"] = changed
    with pytest.raises(CorruptDataError):
        deltas.decode(b"".join(body(arrays, encoded.metadata)), model[0])


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16"])
def test_positions_past_int32_in_a_vector(dtype: str) -> None:
    """Many tensors together; only the changed blocks take memory, but two numbers for each block between."""
    count = 1 << 28
    specs = {str(n): TensorSpec(str(n), dtype, (count,)) for n in range(9)}
    layout = Layout(specs)
    held = layout.vectors[specs["0"].item_bytes]
    at_K = np.array([5, count - 1, count, (1 << 31) - 1, 1 << 31, (1 << 31) + (1 << 19), 9 * count - 1])
    sent = Delta(layout, {held.width: Sparse(at_K, np.arange(1, 8, dtype=held.bits_dtype))})
    digests = dict.fromkeys(sent.counts(), 7)
    data = (
        codec.get("packed")
        .encode(sent, lambda name: (np.empty(0, held.bits_dtype), 0), digests, 2, 1)
        .to_bytes()
    )
    delta, found = deltas.decode(data, specs)
    assert found == digests and delta.steps[held.width].at_K.dtype == np.int64
    np.testing.assert_array_equal(delta.steps[held.width].at_K, at_K)
    np.testing.assert_array_equal(delta.steps[held.width].data_K, sent.steps[held.width].data_K)
    last, _ = deltas.decode(data, specs, None, lambda name: [(count - 1, ((1, 1),))] if name == "8" else [])
    assert last.steps[held.width].at_K.tolist() == [9 * count - 1]


def test_context_without_the_old_bits_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    _small(monkeypatch, tiles.TILE)
    model = _like_training("bfloat16", 1000, 0.1)
    data = _encode("context", model)
    with pytest.raises(StageError, match="needs the old"):
        deltas.decode(data, model[0])


@CODECS
@given(model=our.model_pairs())
def test_safetensors_opens_every_payload(codec_name: str, model: Model) -> None:
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(_encode(codec_name, model))
        file.flush()
        with safe_open(file.name, framework="pt") as opened:
            metadata = opened.metadata()
            assert metadata["format"] == "deltasync/2"
            assert metadata["codec"] == codec_name
            assert (metadata["version"], metadata["base_version"]) == ("8", "7")
            for key in opened.keys():  # noqa: SIM118 (not a mapping)
                opened.get_tensor(key)
    if codec_name != "raw":
        return
    specs, old, new = model
    rows = json.loads(metadata["patches"])
    assert {name: row["changed"] for name, row in rows.items()} == {
        name: int((old[name] != new[name]).sum()) for name in specs if (old[name] != new[name]).any()
    }


ENTRIES = {
    f"{dtype}{kind}": (dtype, shape)
    for dtype in (*our.DTYPES, "bool")
    for kind, shape in (("", (3,)), ("~", ()))
}


@pytest.mark.parametrize("record_bytes", [None, 0, 1, 1000])
@pytest.mark.parametrize("named", [["bfloat16"], [], [*ENTRIES, "~~", "empty"]], ids=["one", "none", "all"])
def test_a_body_is_a_file_whose_last_entry_is_the_record(named: list[str], record_bytes: int | None) -> None:
    random = np.random.default_rng(0)
    arrays = {}
    for name in named:
        dtype, shape = ENTRIES.get(name, ("uint8", (0,) if name == "empty" else (5,)))
        spec = TensorSpec(name, dtype, shape)
        values = random.integers(
            0, 2 if dtype == "bool" else 256, spec.element_count * spec.item_bytes, np.uint8
        )
        arrays[name] = tensor_of(values.view(spec.bits_dtype), spec)
    document = random.integers(0, 256, record_bytes or 0, np.uint8)
    encoded = Encoded(arrays, {"format": "ü"} if named else {})
    buffers = body(arrays, encoded.metadata) if record_bytes is None else encoded.of_record(record_bytes)
    assert sum(map(len, buffers)) == len(b"".join(buffers))
    for array in arrays.values():
        if array.numel() and record_bytes is None:
            assert any(
                buffer.nbytes and np.frombuffer(buffer, np.uint8).ctypes.data == array.data_ptr()
                for buffer in buffers
            )
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(b"".join([*buffers, document.data]))
        file.flush()
        with safe_open(file.name, framework="pt") as opened:
            assert set(opened.keys()) == {*arrays, *([] if record_bytes is None else [".record"])}
            assert opened.metadata() == ({"format": "ü"} if named else None)
            for name, array in arrays.items():
                found = opened.get_tensor(name)
                assert (found.dtype, found.shape) == (array.dtype, array.shape)
                np.testing.assert_array_equal(bits_of(found), bits_of(array))
            if record_bytes is not None:
                np.testing.assert_array_equal(opened.get_tensor(".record").numpy(), document)


@pytest.mark.parametrize("name", ["__metadata__", ".record"])
def test_a_tensor_cannot_have_a_name_of_the_container(name: str) -> None:
    with pytest.raises(ModelMismatchError, match=name):
        body({name: torch.zeros(1)}, {})


@CODECS
@given(model=our.model_pairs())
def test_a_record_reads_as_its_payload(codec_name: str, model: Model) -> None:
    encoded = _encoded(codec_name, model)
    data = encoded.to_bytes()
    record = b"".join([*encoded.of_record(5), b"12345"])
    _assert_leads_from_old_to_new(record, model)
    assert codec.open_payload(record).arrays.keys() == codec.open_payload(data).arrays.keys()
    assert data == _encode(codec_name, model)


def test_a_payload_of_another_format_is_not_read() -> None:
    encoded = _encoded("packed", _like_training("bfloat16", 1000, 0.1))
    data = b"".join(body(encoded.arrays, encoded.metadata | {"format": "deltasync/1"}))
    with pytest.raises(FormatError, match="deltasync/1"):
        codec.open_payload(data)


@given(our.model_pairs())
def test_raw_has_the_layout_and_the_fields_of_the_blog_format(model: Model) -> None:
    payload = codec.open_payload(_encode("raw", model))
    changed = _changed(model)
    assert json.loads(payload.metadata["changed_params"]) == changed
    assert payload.metadata["sparse"] == "true"
    assert payload.metadata["model_version"] == "8"
    assert 0.0 <= float(payload.metadata["sparsity"]) <= 1.0
    assert payload.arrays.keys() == {f"{name}.{part}" for name in changed for part in ("indices", "values")}


def test_a_tensor_that_changed_everywhere_at_random_travels_as_steps() -> None:
    spec = TensorSpec("w", "bfloat16", (64, 64))
    random = np.random.default_rng(0)
    old, new = (random.integers(0, 1 << 16, 4096, np.uint16) for _ in range(2))
    model = ({"w": spec}, {"w": old}, {"w": new})
    for codec_name in ("packed", "context"):
        data = _encode(codec_name, model)
        assert len(data) < 1.15 * new.nbytes + 1000
        _assert_leads_from_old_to_new(data, model)


def test_an_unknown_codec_is_unsupported() -> None:
    with pytest.raises(FormatError, match="telepathy"):
        codec.get("telepathy")
