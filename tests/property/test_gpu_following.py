"""A follower whose weights are on a GPU, which Triton's interpreter plays: words cross, are decoded, staged,
committed.
"""

from __future__ import annotations

import uuid
from unittest import mock

import numpy as np
import pytest
import torch

from deltasync import Publisher, kernels, open_store
from deltasync.channel import payloads
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.codec import open_payload, tiles
from deltasync.errors import CorruptDataError
from deltasync.following import LiveWeights
from deltasync.live import LiveMemory, Segment, model_fingerprint
from deltasync.tensors.bits import int_view
from tests.devices import StandIn
from tests.interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="test_interpreted.py runs it")

if INTERPRETED:
    from deltasync.gpu import segments as gpu_segments

SHAPES = {"a": (40, 24), "bias": (30,), "router": (7, 5), "z": (16, 16)}


class Gpu(StandIn):
    decodes = True


def _states(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    dtypes = {name: torch.float32 if name == "router" else torch.bfloat16 for name in SHAPES}
    found = [
        {name: torch.randn(shape, generator=generator).to(dtypes[name]) for name, shape in SHAPES.items()}
    ]
    for _ in range(count - 1):
        found.append({name: tensor.clone() for name, tensor in found[-1].items()})
        for number, (name, tensor) in enumerate(found[-1].items()):
            if name != "bias" or len(found) == 3:
                int_view(tensor).view(-1)[len(found) + number :: 7] += 1
    return found


@pytest.mark.parametrize("codec", ["packed", "context"])
def test_versions_are_decoded_where_the_weights_are(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "LEAST", 16)
    monkeypatch.setattr(tiles, "SMALL", 0)
    monkeypatch.setattr(tiles, "FEW", 0)
    store, states = open_store(f"memory://{uuid.uuid4().hex}"), _states(4)
    with Publisher(store, codec=codec, dtype="bfloat16,router=keep") as publisher:
        for state in states:
            publisher.publish(state.items()).wait(300)
    monkeypatch.setattr(kernels, "ACCELERATORS", {"cuda", "cpu"})
    reader, device = ChannelReader(store), Gpu(gpu_segments)
    live = {name: tensor.clone() for name, tensor in states[0].items()}
    copy = live["a"].clone()  # another copy, as of tied weights
    segments = {name: [Segment(int_view(tensor), (1,), 0)] for name, tensor in live.items()}
    segments["a"].append(Segment(int_view(copy), (1,), 0))
    memory = LiveMemory(reader.specs, segments, lambda of: device)
    memory.audit()
    follower = LiveWeights(reader, memory)
    follower.identified(reader.numbered(1))
    on_host = mock.patch.object(payloads, "decode", side_effect=AssertionError("decoded on the host"))
    for number, state in enumerate(states[1:], 2):
        chain = find_chain(reader, follower.version, reader.numbered(number).version)
        with on_host:
            staged = follower.stage(chain)
        follower.confirm(follower.commit(staged))
        for name, tensor in state.items():
            np.testing.assert_array_equal(int_view(live[name]).numpy(), int_view(tensor).numpy())
        assert torch.equal(int_view(copy), int_view(state["a"]))
        before = model_fingerprint(memory.fingerprints)
        memory.audit()
        assert model_fingerprint(memory.fingerprints) == before


def test_a_damaged_payload_is_refused_and_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    store, states = open_store(f"memory://{uuid.uuid4().hex}"), _states(2)
    with Publisher(store, codec="packed", dtype="bfloat16,router=keep") as publisher:
        for state in states:
            publisher.publish(state.items()).wait(300)
    monkeypatch.setattr(kernels, "ACCELERATORS", {"cuda", "cpu"})
    reader, device = ChannelReader(store), Gpu(gpu_segments)
    live = {name: tensor.clone() for name, tensor in states[0].items()}
    segments = {name: [Segment(int_view(tensor), (1,), 0)] for name, tensor in live.items()}
    memory = LiveMemory(reader.specs, segments, lambda of: device)
    memory.audit()
    follower = LiveWeights(reader, memory)
    follower.identified(reader.numbered(1))
    chain = find_chain(reader, follower.version, reader.numbered(2).version)
    ((key, data),) = payloads.fetch(reader, chain[0])
    damaged, words = bytearray(data), open_payload(data).arrays[".2.words"].tobytes()
    damaged[data.index(words) + len(words) // 2] ^= 1
    with (
        mock.patch.object(payloads, "fetch", lambda *_: [(key, bytes(damaged))]),
        pytest.raises(CorruptDataError, match="malformed") as caught,
    ):
        follower.stage(chain)
    assert caught.value.key == chain[0].key
    for name, tensor in states[0].items():
        assert torch.equal(int_view(live[name]), int_view(tensor))


SHARED = {"rows": (32, 16), "columns": (16, 48), "experts": (4, 8, 16), "later": (16, 16), "copied": (16, 16)}
"""Tensors that are coded by tiles, by how two workers share them."""


def _share(whole: torch.Tensor, way: str, worker: int) -> list[Segment]:
    """What a worker holds of a tensor; the second one with gaps behind rows, and shares in two segments."""
    dim = {"rows": -2, "columns": -1, "experts": 0}.get(way)
    part = whole if dim is None else whole.chunk(2, dim)[worker]
    if way == "later":  # a stage of a pipeline
        part = whole[: whole.shape[0] * worker]
    room = torch.zeros(*part.shape[:-1], part.shape[-1] + 8 * worker, dtype=part.dtype)
    live = room[..., : part.shape[-1]]
    live.copy_(part)
    pieces = live.chunk(2) if worker and dim is not None else [live]
    first_P = [part.storage_offset() + n * pieces[0].shape[0] * part.stride()[0] for n in range(len(pieces))]
    return [Segment(piece, part.stride(), first) for piece, first in zip(pieces, first_P, strict=True)]


def test_workers_decode_the_tiles_of_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on its own device: together they decode once what a version changes, and twice what both hold."""
    monkeypatch.setattr(tiles, "TILE", 32)
    monkeypatch.setattr(tiles, "LEAST", 16)
    monkeypatch.setattr(tiles, "FEW", 0)
    generator, old = torch.Generator().manual_seed(1), dict[str, torch.Tensor]()
    for name, shape in {**SHARED, "few": (7, 5), "same": (30,)}.items():
        old[name] = torch.randn(shape, generator=generator).to(torch.bfloat16)
    new = {name: tensor.clone() for name, tensor in old.items()}
    for name in new.keys() - {"same"}:
        int_view(new[name]).add_(torch.rand(new[name].numel(), generator=generator) < 0.3)
    store = open_store(f"memory://{uuid.uuid4().hex}")
    with Publisher(store, codec="context", dtype="keep") as publisher:
        for state in (old, new):
            publisher.publish(state.items()).wait(300)
    reader = ChannelReader(store)
    monkeypatch.setattr(kernels, "ACCELERATORS", {"cuda", "cpu"})
    monkeypatch.setattr(payloads, "decode", lambda *_: pytest.fail("decoded on the host"))
    counts: list[dict[str, int]] = []
    for worker in range(2):
        device = Gpu(gpu_segments)
        held = {
            name: _share(int_view(tensor).view(tensor.shape), name, worker) for name, tensor in old.items()
        }
        memory = LiveMemory(reader.specs, held, lambda _, device=device: device)
        memory.audit()
        follower = LiveWeights(reader, memory)
        follower.identified(reader.numbered(1))
        chain = find_chain(reader, follower.version, reader.numbered(2).version)
        with mock.patch.object(memory, "stage", wraps=memory.stage) as staged:
            follower.commit(follower.stage(chain))
        counts.append(staged.call_args.args[0].delta.counts())
        for name, segments in held.items():
            for segment in segments:
                assert torch.equal(segment.live, segment.source(int_view(new[name])))
    for name in SHARED:
        changed = int((int_view(new[name]) != int_view(old[name])).sum())
        assert sum(each.get(name, 0) for each in counts) == changed * (1 + (name == "copied"))
