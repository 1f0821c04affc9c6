"""Workers that hold parts of tiles: each decodes `context` from a whole copy that changes with its
commits.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltasync import Publisher, open_store
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.channel.record import StoredRecord
from deltasync.codec import tiles
from deltasync.errors import FingerprintMismatchError, StageError
from deltasync.following import LiveWeights
from deltasync.live import LiveMemory, Prints, Segment, Union
from deltasync.tensors.bits import bits_of

# the first of the two workers has 37 rows, which are no whole tiles
VERSIONS, SHAPE, AT = 6, (96, 64), 37 * 64


@pytest.fixture(scope="module")
def channel() -> Iterator[tuple[ChannelReader, dict[int, np.ndarray]]]:
    """Versions and their bits: four in tiles, then two that can be undone; full weights beside each third."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "LEAST", 16)
        patch.setattr(tiles, "SMALL", 0)
        patch.setattr(tiles, "FEW", 0)
        store, states = open_store(f"memory://{uuid.uuid4().hex}"), {}
        tensor = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
        for codec, numbers in {"context": range(1, 5), "packed": range(5, VERSIONS + 1)}.items():
            with Publisher(store, codec=codec, anchor_every=3, resume=codec == "packed") as publisher:
                for version in numbers:
                    tensor.view(torch.int16).view(-1)[version::13] += 1
                    assert publisher.publish({"w": tensor}.items()).wait(60).version == version
                    states[version] = bits_of(tensor).copy()
        yield ChannelReader(store), states


class Two:
    """Two workers of one replica."""

    def __init__(self, reader: ChannelReader) -> None:
        self.reader = reader
        self.halves = [torch.zeros(size, dtype=torch.int16) for size in (AT, SHAPE[0] * SHAPE[1] - AT)]
        self.completed = 0
        self.followers = []
        for half, start in zip(self.halves, (0, AT), strict=True):
            memory = LiveMemory(reader.specs, {"w": [Segment(half, (1,), start)]})
            memory.audit()
            self.followers.append(LiveWeights(reader, memory))

    def bits(self) -> np.ndarray:
        return bits_of(torch.cat(self.halves))

    def whole(self) -> list[np.ndarray]:
        return [follower._whole["w"] for follower in self.followers]

    def take(self, way: Sequence[StoredRecord], *, wrong: bool = False) -> None:
        """As the driver has workers take a way; `wrong` tells them another fingerprint than they have
        found.
        """
        try:
            staged = [follower.stage(way) for follower in self.followers]
        except StageError as error:
            assert error.tensors == ["w"]
            self.completed += 1
            for follower in self.followers:
                follower.complete("w", self.bits().copy())
            staged = [follower.stage(way) for follower in self.followers]
        committed = [follower.commit(each) for follower, each in zip(self.followers, staged, strict=True)]
        memories = [follower.memory for follower in self.followers]
        union = Union(["w"], [memory.regions for memory in memories])
        found = union.of(np.concatenate([memory.known_parts for memory in memories]))
        for follower, each in zip(self.followers, committed, strict=True):
            value_T = found.value_T + np.uint64(wrong)
            with pytest.raises(FingerprintMismatchError) if wrong else contextlib.nullcontext():
                follower.confirm(each, Prints(value_T, found.same_T))
            follower.settled = True


@given(
    st.lists(
        st.tuples(st.integers(1, VERSIONS), st.sampled_from(["take", "wrong", "anew"])),
        min_size=1,
        max_size=8,
    )
)
def test_parts_of_tiles_follow_every_way(
    channel: tuple[ChannelReader, dict[int, np.ndarray]], moves: list[tuple[int, str]]
) -> None:
    reader, states = channel
    two, have = Two(reader), None
    for number, how in moves:
        target = reader.numbered(number)
        if how == "anew":
            for follower in two.followers:
                follower.identified(None)
            have = None
        start = have if have is None or have.version <= number else None
        way = find_chain(reader, start, target.version)
        if not way:
            continue
        two.take(way, wrong=how == "wrong")
        have = have if how == "wrong" else target.version
        if have is not None:
            np.testing.assert_array_equal(two.bits(), states[have.version])
            assert two.completed <= 1
            if two.completed:
                assert all(np.array_equal(whole, states[have.version]) for whole in two.whole())
