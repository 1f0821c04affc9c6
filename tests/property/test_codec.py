from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from deltasync import codec, fingerprint
from deltasync.codec import packed
from deltasync.errors import UnsupportedFormatError
from deltasync.kernels import reference
from deltasync.types import TensorSpec
from tests import strategies as our

Model = tuple[dict[str, TensorSpec], dict[str, np.ndarray], dict[str, np.ndarray]]

CODECS = pytest.mark.parametrize("codec_name", ["raw", "packed"])


@pytest.fixture(params=[1, 7, 64, 1 << 20], ids="block={}".format, scope="module")
def block_elements(request: pytest.FixtureRequest) -> Iterator[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "BLOCK", request.param)
        yield request.param


def _encode(codec_name: str, model: Model) -> bytes:
    specs, old, new = model
    encoder = codec.get(codec_name).encoder()
    for name, spec in specs.items():
        index_K, step_K = reference.diff(old[name], new[name])
        if index_K.size:
            digest = reference.fingerprint(fingerprint.tensor_key(name), new[name])
            encoder.add(spec, index_K, step_K, new[name], fingerprint.to_hex(digest))
    return encoder.finish(8, 7)


def _assert_leads_from_old_to_new(data: bytes, model: Model) -> None:
    specs, old, new = model
    payload = codec.open_payload(data)
    assert (payload.version, payload.base_version) == (8, 7)
    assert list(payload.patches) == [name for name in specs if (old[name] != new[name]).any()]
    reached = {name: bits.copy() for name, bits in old.items()}
    for patch in codec.get(payload.codec).decode(payload, specs):
        if patch.index_K is None:
            assert patch.absolute
            reached[patch.name] = patch.data
        elif patch.absolute:
            reached[patch.name][patch.index_K] = patch.data
        else:
            reached[patch.name][patch.index_K] += patch.data
    for name in specs:
        np.testing.assert_array_equal(reached[name], new[name], err_msg=name)
    for name, digest in payload.fingerprints.items():
        assert digest == reference.fingerprint(fingerprint.tensor_key(name), new[name])


@given(our.model_pairs())
def test_raw_round_trip(model: Model) -> None:
    _assert_leads_from_old_to_new(_encode("raw", model), model)


@given(model=our.model_pairs())
def test_packed_round_trip_in_blocks_of_any_size(block_elements: int, model: Model) -> None:
    _assert_leads_from_old_to_new(_encode("packed", model), model)


@CODECS
@given(model=our.model_pairs())
def test_safetensors_opens_every_payload(codec_name: str, model: Model) -> None:
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(_encode(codec_name, model))
        file.flush()
        with safe_open(file.name, framework="pt") as opened:
            metadata = opened.metadata()
            assert metadata["format"] == "deltasync/1"
            assert metadata["codec"] == codec_name
            assert (metadata["version"], metadata["base_version"]) == ("8", "7")
            rows = json.loads(metadata["patches"])
            for key in opened.keys():  # noqa: SIM118 (not a mapping)
                opened.get_tensor(key)
    specs, old, new = model
    assert {name: row["changed"] for name, row in rows.items()} == {
        name: int((old[name] != new[name]).sum()) for name in specs if (old[name] != new[name]).any()
    }


@given(our.model_pairs())
def test_raw_has_the_layout_and_the_fields_of_the_blog_format(model: Model) -> None:
    specs, old, new = model
    payload = codec.open_payload(_encode("raw", model))
    changed = [name for name in specs if (old[name] != new[name]).any()]
    assert json.loads(payload.metadata["changed_params"]) == changed
    assert payload.metadata["sparse"] == "true"
    assert payload.metadata["model_version"] == "8"
    assert 0.0 <= float(payload.metadata["sparsity"]) <= 1.0
    assert payload.arrays.keys() == {f"{name}.{part}" for name in changed for part in ("indices", "values")}


_ascending = st.lists(st.integers(0, 2000), min_size=1, max_size=60, unique=True).map(sorted)


@given(_ascending)
def test_gap_stream_round_trip(indices: list[int]) -> None:
    local_K = np.array(indices, np.int64)
    stream = packed.encode_gaps(local_K)
    np.testing.assert_array_equal(packed.decode_gaps(stream, local_K.size), local_K)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 100_000])
def test_gap_escapes(gap: int) -> None:
    stream = packed.encode_gaps(np.array([gap, 2 * gap + 1], np.int64))
    assert stream.tolist() == 2 * ([255] * (gap // 255) + [gap % 255])
    assert packed.decode_gaps(stream, 2).tolist() == [gap, 2 * gap + 1]


@given(st.data(), our.widths)
def test_step_stream_round_trip(data: st.DataObject, width: int) -> None:
    top = (1 << (8 * width)) - 1
    near = st.integers(-200, 200).filter(bool).map(lambda step: step & top)
    steps = data.draw(st.lists((near | st.integers(1, top)).filter(bool), min_size=1, max_size=60))
    step_K = np.array(steps, f"u{width}")
    stream = np.frombuffer(packed.encode_steps(step_K), np.uint8)
    np.testing.assert_array_equal(packed.decode_steps(stream, step_K.size, step_K.dtype), step_K)


def test_step_escapes_start_at_zigzag_256() -> None:
    step_K = np.array([1, -1, 127, -128, 128, -129], np.int16).view(np.uint16)
    # zigzag - 1:       1,  0, 253,  254, 255,  256
    stream = packed.encode_steps(step_K)
    assert stream == bytes([1, 0, 253, 254, 255, 255]) + bytes([255, 0, 0, 1])


def test_steps_of_one_byte_never_escape() -> None:
    step_K = np.arange(1, 256, dtype=np.uint8)
    assert len(packed.encode_steps(step_K)) == 255


def test_a_tensor_that_changed_everywhere_at_random_goes_dense() -> None:
    spec = TensorSpec("w", "bfloat16", (64, 64))
    random = np.random.default_rng(0)
    old, new = (random.integers(0, 1 << 16, 4096, np.uint16) for _ in range(2))
    model = ({"w": spec}, {"w": old}, {"w": new})
    payload = codec.open_payload(_encode("packed", model))
    assert payload.patches["w"]["dense"] is True
    assert payload.arrays["w"].shape == (64, 64)
    _assert_leads_from_old_to_new(_encode("packed", model), model)


def test_packed_takes_less_than_a_third_of_raw_on_what_training_changes() -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 1 << 16, 1 << 18, np.uint16)
    new = old.copy()
    changed = random.random(old.size) < 0.01
    new[changed] += random.choice(np.array([1, 2, 0xFFFF, 0xFFFE], np.uint16), int(changed.sum()))
    model = ({"w": TensorSpec("w", "bfloat16", (512, 512))}, {"w": old}, {"w": new})
    assert 3 * len(_encode("packed", model)) < len(_encode("raw", model))


def test_an_unknown_codec_is_unsupported() -> None:
    with pytest.raises(UnsupportedFormatError, match="telepathy"):
        codec.get("telepathy")
