from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

from deltasync.channel import anchors
from deltasync.codec.base import entries, read_metadata
from deltasync.errors import CorruptDataError
from deltasync.tensors import SAFETENSORS_DTYPES, bits


def test_shards_stay_below_the_limit_and_the_index_names_every_tensor() -> None:
    tensors = {f"t{i}": torch.full((10,), i, dtype=torch.float32) for i in range(5)} | {
        "big": torch.zeros(100)
    }
    files = dict(anchors.weight_files(tensors, dict.fromkeys(tensors, 7), shard_bytes=80))
    index = json.loads(files.pop("model.safetensors.index.json"))
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert sorted(set(index["weight_map"].values())) == sorted(files)
    assert len(files) == 4  # two, two, one small tensors, and the big one by itself
    assert all(anchors.fingerprints(data) for data in files.values())


TENSORS = {
    "bf16": torch.randn(40, 50, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "fp32": torch.randn(3000, generator=torch.Generator().manual_seed(1)),
    "fp8": torch.randn(2000, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn),
    "noise": torch.randint(0, 256, (3000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)),
    "nans": torch.full((3, 300), float("nan"), dtype=torch.float16),
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 7),
}
SPECS = {name: bits.spec_of(name, tensor) for name, tensor in TENSORS.items()}
DIGESTS = {name: number for number, name in enumerate(TENSORS)}


@pytest.mark.parametrize("shard_bytes", [1 << 30, 5000], ids=["one file", "sharded"])
def test_weight_files_give_back_every_bit(shard_bytes: int) -> None:
    files = dict(anchors.weight_files(TENSORS, DIGESTS, shard_bytes))
    files.pop("model.safetensors.index.json", None)
    assert (len(files) > 1) == (shard_bytes == 5000)
    found = {
        name: (bits_N, digest)
        for data in files.values()
        for name, bits_N, digest in anchors.read_weights(data, SPECS)
    }
    assert found.keys() == TENSORS.keys()
    for name, (bits_N, digest) in found.items():
        assert digest == DIGESTS[name]
        np.testing.assert_array_equal(bits_N, bits.bits_of(TENSORS[name]))
    for data in files.values():
        assert read_metadata(data)["format"] == "pt"


def test_entries_are_what_safetensors_reads() -> None:
    ((_, data),) = anchors.weight_files(TENSORS, DIGESTS, 1 << 30)
    found, expected = entries(data, len(data)), load(bytes(data))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        dtype, shape, first, last = found[name]
        assert (dtype, shape) == (SAFETENSORS_DTYPES[SPECS[name].dtype], tuple(tensor.shape))
        assert data[first:last] == bits.bits_of(tensor).tobytes()


def test_weights_at_odd_places_are_read() -> None:
    ((_, data),) = anchors.weight_files(TENSORS, DIGESTS, 1 << 30)
    length = int.from_bytes(data[:8], "little")
    odd = (length + 1).to_bytes(8, "little") + bytes(data[8 : 8 + length]) + b" " + bytes(data[8 + length :])
    found = {name: bits_N for name, bits_N, _ in anchors.read_weights(odd, SPECS)}
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(found[name], bits.bits_of(tensor))


ENTRY = {"dtype": "I16", "shape": [2], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"a": ENTRY | {"data_offsets": [0, 2]}},
        {"a": ENTRY | {"data_offsets": [2, 6]}},
        {"a": ENTRY | {"data_offsets": [0, 6], "shape": [3]}},
        {"a": ENTRY | {"data_offsets": [0.0, 4.0]}},
        {"a": ENTRY | {"data_offsets": [0]}},
        {"a": ENTRY | {"data_offsets": "04"}},
        {"a": ENTRY | {"shape": [-1, -2]}},
        {"a": ENTRY | {"shape": [2.0]}},
        {"a": ENTRY | {"shape": "2"}},
        {"a": ENTRY | {"shape": [1 << 70]}},
        {"a": ENTRY | {"dtype": "I3"}},
        {"a": ENTRY | {"dtype": []}},
        {"a": {"dtype": "I16"}},
        {"a": []},
        {"a": ENTRY, "b": ENTRY},
        {
            "a": ENTRY | {"shape": [1], "data_offsets": [0, 2]},
            "b": ENTRY | {"shape": [1], "data_offsets": [1, 3]},
        },
        [],
        "a",
        None,
    ],
)
def test_entries_that_do_not_cover_a_file_are_corrupt(found: Any) -> None:
    header = json.dumps(found).encode()
    with pytest.raises(CorruptDataError):
        entries(len(header).to_bytes(8, "little") + header + bytes(4), 12 + len(header))


def test_fingerprints_survive_the_metadata() -> None:
    fingerprints = {"a": 0, "b": (1 << 64) - 1}
    tensors = {name: torch.zeros(3) for name in fingerprints}
    ((name, data),) = anchors.weight_files(tensors, fingerprints, 1 << 30)
    assert name == "model.safetensors"
    assert anchors.fingerprints(data) == fingerprints
    assert read_metadata(data)["format"] == "pt"
