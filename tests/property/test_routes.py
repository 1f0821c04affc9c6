"""One sha256 and one fingerprint of a version, whichever way somebody came to have it."""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltasync import Publisher, Replica, open_store, ops
from deltasync.channel import payloads
from deltasync.channel.plan import find_chain
from deltasync.channel.reading import ChannelReader
from deltasync.following import LiveWeights
from deltasync.kernels import native, reference
from deltasync.live import HostMemory, LiveMemory, Segment, Union, model_fingerprint
from deltasync.ops import KeepPolicy
from deltasync.stores import Store
from deltasync.tensors import TensorSpec, fingerprint
from deltasync.tensors.bits import bits_of, int_view, tensor_of
from tests import independent_reader, strategies

Specs = dict[str, TensorSpec]
Bits = dict[str, np.ndarray]
Proof = tuple[str, int]  # sha256 of all bits, fingerprint of the model

CODECS = ("raw", "packed", "context")


@st.composite
def lives(draw: st.DrawFn) -> tuple[Specs, list[Bits]]:
    """A small model and its bits at two to six versions."""
    specs, first, second = draw(strategies.model_pairs())
    states = [first, second]
    for _ in range(draw(st.integers(0, 4))):
        states.append(
            {name: draw(strategies.new_bits(states[-1][name], spec.dtype)) for name, spec in specs.items()}
        )
    return specs, states


def proof(bits: Mapping[str, np.ndarray], total: int) -> Proof:
    digest = hashlib.sha256()
    for name in sorted(bits):
        digest.update(name.encode() + bits[name].tobytes())
    return digest.hexdigest(), total


def of_tensors(tensors: Mapping[str, torch.Tensor]) -> Proof:
    """With the fingerprints computed anew by the CPU kernels."""
    bits = {name: bits_of(tensor) for name, tensor in tensors.items()}
    digests = {
        name: native.fingerprint(fingerprint.tensor_key(name), bits_N) for name, bits_N in bits.items()
    }
    return proof(bits, model_fingerprint(digests))


def of_replica(replica: Replica) -> Proof:
    """With the fingerprints that it kept up to date from the changes alone."""
    found = proof(
        {name: bits_of(tensor) for name, tensor in replica.state_dict().items()},
        total_of(replica.fingerprints),
    )
    assert found == of_tensors(replica.state_dict())
    return found


def total_of(digests: Mapping[str, int]) -> int:
    return sum(digests.values()) & fingerprint.MASK


def published(
    specs: Specs,
    states: list[Bits],
    codec: str,
    anchor_every: int,
    restart_at: int | None = None,
    then: str | None = None,
) -> Store:
    """A channel with these versions; its publisher ends after `restart_at` of them, and another one goes on.

    Args:
        then: Codec of the other one.
    """
    store = open_store(f"memory://{uuid.uuid4().hex}")
    publisher = Publisher(store, codec=codec, dtype="keep", anchor_every=anchor_every)
    for version, bits in enumerate(states, 1):
        stream = [(name, tensor_of(bits[name].copy(), spec)) for name, spec in specs.items()]
        assert publisher.publish(stream).wait(60).version == version
        if version == restart_at:
            publisher.close()
            publisher = Publisher(store, codec=then, dtype="keep", anchor_every=anchor_every, resume=True)
    publisher.close()
    return store


def by_following(store: Store, count: int, between: int) -> dict[str, Proof]:
    """By a replica in host memory: from nothing, version by version, or with some left out."""
    found = {}
    for name, stops in {"cold": [], "each": range(1, count), "skipping": [between]}.items():
        replica = Replica(store)
        for version in [*stops, count]:
            replica.sync(version)
        found[name] = of_replica(replica)
    return found


def by_compaction(store: Store, count: int, base: int, codec: str) -> Proof:
    """By one compaction from a version before; the deltas that it covers are not looked at."""
    reader = ChannelReader(store)
    compaction = ops.write_compaction(reader, base, count, codec_name=codec)
    memory, tensors = HostMemory.on_host(reader.specs)
    memory.audit()
    follower = LiveWeights(reader, memory)
    for way in (find_chain(reader, None, reader.numbered(base).version), [compaction]):
        follower.confirm(follower.commit(follower.stage(way)))
    assert follower.version == reader.numbered(count).version
    return of_tensors(tensors)


def by_restart(store: Store, count: int, before: int) -> Proof:
    """By a replica that wrote down what it had as a checkpoint, and starts from that."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "saved"
        ops.export(ChannelReader(store), before, saved)
        replica = Replica(store)
        replica.load(saved)
        assert replica.sync() == count
        return of_replica(replica)


def by_reference_kernels(store: Store, count: int) -> Proof:
    """By the reference kernels alone, from the last anchor on, without anything of a replica."""
    reader = ChannelReader(store)
    bits = {name: np.zeros(spec.element_count, spec.bits_dtype) for name, spec in reader.specs.items()}
    digests = {name: reference.fingerprint(fingerprint.tensor_key(name), held) for name, held in bits.items()}
    for stored in find_chain(reader, None, reader.numbered(count).version):
        if stored.use_anchor:
            weights = payloads.weights(reader, stored)
            changes = [(name, np.arange(held.size), held - bits[name]) for name, held, _ in weights]
            expected = {name: digest for name, _, digest in payloads.weights(reader, stored)}
        else:
            delta, expected = payloads.delta(reader, stored, lambda name: bits[name].copy())
            changes = [(name, *delta.of(name)) for name in expected]
        for name, index_K, step_K in changes:
            key = fingerprint.tensor_key(name)
            bits[name][index_K] += step_K
            digests[name] = reference.fingerprint(key, bits[name])
        assert {name: digests[name] for name in expected} == expected
    return proof(bits, total_of(digests))


def by_copy(store: Store, count: int) -> tuple[Proof, Proof]:
    """By a copy of the channel in a directory: a replica's, and that of a reader written from docs/format.md
    alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        ops.copy(ChannelReader(store), open_store(f"file://{folder}"))
        model = independent_reader.Channel(Path(folder)).read(count)
        bits = {name: found for name, (_, _, found) in model.items()}
        total = total_of({name: independent_reader.fingerprint(name, found) for name, found in bits.items()})
        replica = Replica(f"file://{folder}")
        assert replica.sync() == count
        return of_replica(replica), proof(bits, total)


def by_what_is_left(store: Store, count: int) -> Proof:
    """By a replica, once all other versions are forgotten and their bytes deleted."""
    reader = ChannelReader(store)
    ops.gc(reader, KeepPolicy(last=1))
    ops.gc(ChannelReader(store), grace_s=0.0)
    replica = Replica(store)
    assert replica.sync() == count
    return of_replica(replica)


def by_shards(store: Store, count: int, shards: int) -> Proof:
    """By workers that hold a range of each tensor, agree on fingerprints, and know nothing of each other's
    bits.
    """
    reader = ChannelReader(store)
    held: list[Bits] = [{} for _ in range(shards)]
    for name, spec in reader.specs.items():
        for shard in range(shards):
            first, end = (spec.element_count * part // shards for part in (shard, shard + 1))
            held[shard][name] = np.zeros(end - first, spec.bits_dtype)
    followers = []
    for shard, bits in enumerate(held):
        segments = {
            name: [Segment(int_view(torch.from_numpy(bits[name].view(f"i{spec.item_bytes}"))), (1,), start)]
            for name, spec in reader.specs.items()
            for start in [spec.element_count * shard // shards]
        }
        memory = LiveMemory(reader.specs, segments)
        memory.audit()
        followers.append(LiveWeights(reader, memory))
    for stored in find_chain(reader, None, reader.numbered(count).version):
        committed = [follower.commit(follower.stage([stored])) for follower in followers]
        memories = [follower.memory for follower in followers]
        union = Union([*reader.specs], [memory.regions for memory in memories])
        found = union.of(np.concatenate([memory.known_parts for memory in memories]))
        for follower, one in zip(followers, committed, strict=True):
            follower.confirm(one, found)
    assert [follower.version for follower in followers] == [reader.numbered(count).version] * shards
    whole = {name: np.concatenate([bits[name] for bits in held]) for name in reader.specs}
    return proof(whole, found.total)


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=6)
@given(data=st.data(), life=lives())
def test_every_route_to_a_version_gives_the_same_bits_and_fingerprint(
    codec: str, data: st.DataObject, life: tuple[Specs, list[Bits]]
) -> None:
    """Each codec is held to the bits as they went in and the reference kernel's fingerprint of them: so to
    every other.
    """
    specs, states = life
    count, last = len(states), states[-1]
    between = data.draw(st.integers(1, count - 1), "between")
    total = total_of(
        {name: reference.fingerprint(fingerprint.tensor_key(name), bits) for name, bits in last.items()}
    )

    deltas = published(specs, states, codec, anchor_every=99)
    found = {
        **by_following(deltas, count, between),
        "restart": by_restart(deltas, count, between),
        "compaction": by_compaction(
            deltas, count, between, data.draw(st.sampled_from(CODECS), "of the compaction")
        ),
    }
    found |= {f"{shards} shards": by_shards(deltas, count, shards) for shards in (1, 2, 4)}
    found["reference kernels"] = by_reference_kernels(deltas, count)
    found["copied"], found["copied, and read independently"] = by_copy(deltas, count)
    then = data.draw(st.sampled_from(CODECS), "of the publisher that goes on")
    resumed = published(specs, states, codec, anchor_every=99, restart_at=between, then=then)
    found["resumed"] = by_following(resumed, count, between)["cold"]
    anchors = published(specs, states, codec, anchor_every=1)
    found["anchor alone"] = by_following(anchors, count, between)["cold"]

    assert {name: route for name, route in found.items() if route != proof(last, total)} == {}
    assert by_what_is_left(anchors, count) == by_what_is_left(deltas, count) == proof(last, total)
    channels = (deltas, resumed, anchors)
    assert {ChannelReader(store).numbered(count).record.fingerprint for store in channels} == {
        fingerprint.to_hex(total)
    }
