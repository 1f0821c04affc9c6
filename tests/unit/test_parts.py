"""Versions of several payloads, as a sharded trainer writes them, and what is refused of them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from deltasync import Replica, codec, open_store, ops
from deltasync.channel import keys
from deltasync.channel.documents import DeltaFiles
from deltasync.channel.reading import ChannelReader
from deltasync.codec.base import Encoded
from deltasync.errors import CorruptDataError, MissingVersionError
from deltasync.kernels import native
from deltasync.tensors import Delta, Layout, Sparse, TensorSpec, fingerprint
from deltasync.threads import ahead
from tests.channels import Made
from tests.conftest import assert_same_bits

LAYOUT = Layout({"w": TensorSpec("w", "int16", (100,))})
KEY = fingerprint.tensor_key("w")
PATIENCE_S = 60.0


def encode(codec_name: str, at_K: np.ndarray, new_N: np.ndarray, start: int, digest: int = 0) -> Encoded:
    """A payload that adds one at these indices of a range, by the rank that holds it."""
    delta = Delta(LAYOUT, {2: Sparse(at_K, np.ones(at_K.size, np.uint16))})
    return codec.get(codec_name).encode(delta, lambda _: (new_N, start), {"w": digest % (1 << 64)}, 2, 1)


def split(url: str, codec_name: str, parts: list[tuple[list[int], int]]) -> torch.Tensor:
    """Zeros, then ones at some indices as version 2, in parts (indices, error of the fingerprint)."""
    channel = Made(open_store(url), codec_name=codec_name)
    zeros = {"w": torch.zeros(100, dtype=torch.int16)}
    channel.create(zeros)
    channel.anchor(zeros)
    new = np.zeros(100, np.uint16)
    for indices, _ in parts:
        new[indices] = 1
    whole = native.fingerprint(KEY, new)
    files = []
    for number, (indices, error) in enumerate(parts, start=1):
        at_K = np.array(indices, np.int32)
        half = min((number - 1) * 50, indices[0]) if len(indices) < 50 else 0
        payload = encode(codec_name, at_K, new[half:], half, whole + error)
        key = f"{keys.parts_folder(2, channel.epoch)}/{keys.part(number, 1)}"
        files.append(channel.put_file(key, payload.to_bytes()))
    model = {"w": torch.from_numpy(new.view(np.int16))}
    delta = DeltaFiles(codec=codec_name, changed=int(new.sum()), parts=files)
    channel.append(channel.record("delta", 2, model, delta=delta), None, model)
    channel.head()
    return model["w"]


@pytest.mark.parametrize(
    ("codec_name", "parts"),
    [(name, [[0, 7, 50], [60, 99]]) for name in ("packed", "context", "raw")]
    + [(name, [[0, 50, 99], [7, 60]]) for name in ("packed", "raw")],
)
def test_a_tensor_may_be_in_several_payloads(
    memory_url: str, codec_name: str, parts: list[list[int]]
) -> None:
    new = split(memory_url, codec_name, [(indices, 0) for indices in parts])
    replica = Replica(memory_url)
    replica.sync(1)
    replica.sync()
    assert_same_bits(replica.state_dict(), {"w": new})
    reader = ChannelReader(open_store(memory_url))
    assert ops.check(reader, read_data=True).proven == [1, 2]
    compaction = ops.write_compaction(reader, 1, 2, codec_name=codec_name)
    assert compaction.record.delta is not None and compaction.record.delta.changed == 5


@pytest.mark.parametrize("codec_name", ["packed", "raw"])
@pytest.mark.parametrize(
    "parts",
    [
        [([3, 40], 0), ([40, 60], 0)],
        [(list(range(100)), 0), ([50], 0)],
        [([3], 0), ([60], 1)],
    ],
    ids=["an element twice", "one within the other", "another fingerprint"],
)
def test_payloads_that_contradict_each_other_are_refused(
    memory_url: str, codec_name: str, parts: list
) -> None:
    split(memory_url, codec_name, parts)
    replica = Replica(memory_url)
    replica.sync(1)
    with pytest.raises(
        (CorruptDataError, MissingVersionError), match=r"contradicts|changes more elements than"
    ):
        replica.sync(2)
    assert replica.version == 1
    assert_same_bits(replica.state_dict(), {"w": torch.zeros(100, dtype=torch.int16)})


def test_closing_what_is_read_ahead_waits_for_no_thread() -> None:
    """The collector closes what was dropped, maybe where the end of a thread needs a lock that is held: never
    wait there.
    """
    go_on, entered, asked = threading.Event(), threading.Event(), []

    def action(item: int) -> int:
        asked.append(item)
        if item:
            entered.set()
            go_on.wait(PATIENCE_S)
        return item

    found = ahead(action, range(10), 1)
    try:
        assert next(found) == 0
        assert entered.wait(PATIENCE_S)
        closing = threading.Thread(target=found.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive() and not go_on.is_set()
    finally:
        go_on.set()
    assert asked == [0, 1]
