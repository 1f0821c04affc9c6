"""Several workers against one: any layout of shards, any chain of full weights, deltas and compactions, forth
and back.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync import open_store
from deltasync.channel.documents import VersionId, sha256_hex
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.errors import MissingVersionError
from deltasync.tensors.bits import bits_of
from tests import strategies
from tests.channels import Made
from tests.driving import runner_of, target_of
from vllm_plugin.worker import DeltaSyncWorkerExtension

SHAPES = {"embed": (64, 64), "experts": (4, 16, 64), "mlp.down": (64, 128), "norm": (64,), "scale": ()}
Piece = tuple[int, int, int]  # dimension, number, count
Layout = dict[str, Piece]
WHOLE: Layout = dict.fromkeys(SHAPES, (0, 0, 1))


class Shard(torch.nn.Module):
    """One worker's part of the model, and a loader as vLLM's: each tensor's piece is cut out of the
    checkpoint's tensor.
    """

    def __init__(self, layout: Layout, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layout = layout
        self.held = torch.nn.ParameterDict(
            {name.replace(".", "_"): self.piece(name, weights[name]).clone() for name in layout}
        ).requires_grad_(False)

    def piece(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dim, at, count = self.layout[name]
        return tensor.tensor_split(count, dim)[at] if tensor.ndim else tensor

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in self.layout:
                self.held[name.replace(".", "_")].copy_(self.piece(name, tensor))


class Engine:
    """All that a target calls, with all workers on this thread."""

    def __init__(self, layouts: list[Layout], weights: dict[str, torch.Tensor]) -> None:
        self.workers = [DeltaSyncWorkerExtension() for _ in layouts]
        for worker, layout in zip(self.workers, layouts, strict=True):
            model = Shard(layout, weights)
            worker.model_runner = runner_of(lambda model=model: model)

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.workers]


@st.composite
def layouts(draw: st.DrawFn) -> list[Layout]:
    """What each worker holds: rows, columns or experts of a tensor, copies of what another holds, all of it,
    or nothing.
    """
    found: list[Layout] = [{} for _ in range(draw(st.integers(2, 4)))]
    for name, shape in SHAPES.items():
        dim, count = (
            draw(st.integers(0, max(0, len(shape) - 1))),
            draw(st.integers(1, len(found) if shape else 1)),
        )
        for number, worker in enumerate(draw(st.permutations(found))):
            at = number if number < count else draw(st.none() | st.integers(0, count - 1))
            if at is not None:
                worker[name] = dim, at, count
    return found


@st.composite
def channels(draw: st.DrawFn) -> tuple[Made, list[VersionId]]:
    """Some versions, deltas of any codec and full weights, each of which changes a part of some tensors; and
    compactions.
    """
    random = torch.Generator().manual_seed(draw(strategies.seeds))
    weights = {
        name: torch.randn(shape, generator=random).to(torch.bfloat16) for name, shape in SHAPES.items()
    }
    channel = Made(open_store(f"memory://{uuid.uuid4().hex}"))
    channel.create(weights)
    versions = [channel.anchor(weights).version]
    for _ in range(draw(st.integers(1, 5))):
        for name in draw(st.sets(st.sampled_from(sorted(SHAPES)), min_size=1)):
            flat_N = weights[name].view(torch.int16).reshape(-1)
            start = draw(st.integers(0, flat_N.numel() - 1))
            part = flat_N[start : start + draw(st.sampled_from([1, 64, flat_N.numel()]))]
            part += torch.rand(part.shape, generator=random) < draw(st.sampled_from([0.02, 1.0]))
        channel.codec_name = draw(st.sampled_from(["packed", "packed", "context", "raw"]))
        versions.append((channel.delta if draw(st.integers(0, 3)) else channel.anchor)(weights).version)
        if draw(st.booleans()):
            channel.compaction(versions[draw(st.integers(0, len(versions) - 2))], versions[-1])
        if not draw(st.integers(0, 3)):
            channel.announce(versions[-1])
    channel.head()
    return channel, versions


def chain(
    data: st.DataObject, reader: ChannelReader, have: VersionId | None, target: VersionId
) -> list[StoredRecord]:
    """A chain between two versions without some objects; empty if none is left."""
    known = [info.key for _, info in (*reader.slots(), *reader.shortcuts())]
    avoid = dict.fromkeys(data.draw(st.sets(st.sampled_from(known))), "left out")
    try:
        return find_chain(reader, have, target, avoid)
    except MissingVersionError:
        return []


def follow(data: st.DataObject, channel: Made, versions: list[VersionId], held: list[Layout]) -> None:
    reader = ChannelReader(channel.store)
    start = data.draw(st.sampled_from(versions))
    found = [target_of(Engine(each, channel.bits[start.sha256]).call, reader) for each in ([WHOLE], held)]
    for workers in found:
        workers.open(lambda _: reader.record(start))
    live = start
    for target in data.draw(st.lists(st.sampled_from(versions), min_size=1, max_size=4)):
        way = chain(data, reader, live, target)
        for workers in found if way else ():
            assert workers.stage(way) == way
            workers.commit(way)
            live = target
            bits = {
                name: sha256_hex(bits_of(tensor).tobytes())
                for name, tensor in channel.bits[live.sha256].items()
            }
            assert workers.digest() == bits
            workers.settle()
            assert workers.version == live


@settings(max_examples=40)
@given(held=layouts(), model=channels(), data=st.data())
def test_any_layout_serves_what_one_worker_serves(
    held: list[Layout], model: tuple, data: st.DataObject
) -> None:
    blocks = mock.patch("deltasync.codec.tiles.BLOCK", 256)  # so that workers hold none of what changes
    with blocks, mock.patch("vllm_plugin.load.layers.checkpoint", lambda _: iter(())):
        follow(data, *model, held)
