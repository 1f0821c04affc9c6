"""What a replica reads before it fetches weights, and which way it takes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from deltasync.manifest import FileRef, Fold, Manifest
from deltasync.reader import ChannelReader

from deltasync import Publisher, Replica, codec, fingerprint, layout, manifest, open_store
from deltasync.bits import bits_of
from deltasync.errors import CorruptDataError, FingerprintMismatchError, MissingVersionError
from deltasync.kernels import cpu
from deltasync.stores import Store
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore, flipped

Weights = dict[str, torch.Tensor]


def publish_many(
    store: Store, count: int, anchor_every: int = 100, encoding: str = "packed", dense_at: int = 0
) -> list[Weights]:
    """Versions 1 to `count`, and their weights; `dense_at` changes one tensor completely."""
    random = torch.Generator().manual_seed(0)
    states = [{"w": torch.randn(200, 30, generator=random).to(torch.bfloat16), "v": torch.arange(5)}]
    with Publisher(store, anchor_every=anchor_every, codec=encoding) as publisher:
        publisher.publish(states[0].items()).wait(60)
        for version in range(2, count + 1):
            moved = {name: tensor.clone() for name, tensor in states[-1].items()}
            moved["w"].view(torch.int16)[torch.rand(200, 30, generator=random) < 0.02] += 1
            moved["v"] += version == dense_at
            states.append(moved)
            publisher.publish(moved.items()).wait(60)
    return states


def write_fold(store: Store, states: list[Weights], base: int, version: int) -> str:
    """A fold between two versions, made from their weights."""
    reader = ChannelReader(store)
    encoder, changed = codec.get("packed").encoder(), 0
    for name, spec in reader.specs.items():
        old, new = bits_of(states[base - 1][name]).copy(), bits_of(states[version - 1][name]).copy()
        index_K, step_K = cpu.diff(old, new)
        if index_K.size:
            digest = cpu.fingerprint(fingerprint.tensor_key(name), new)
            encoder.add(spec, index_K, step_K, new, fingerprint.to_hex(digest))
            changed += index_K.size
    data = encoder.finish(version, base).to_bytes()
    folder = layout.fold_dir(base, version)
    key = f"{folder}/{layout.delta_part(1, 1)}"
    document = Fold(
        format=manifest.FORMAT,
        run_id=reader.channel().run_id,
        base_version=base,
        base_manifest_sha256=manifest.sha256_hex(store.read(layout.manifest(base))),
        version=version,
        manifest_sha256=manifest.sha256_hex(store.read(layout.manifest(version))),
        codec="packed",
        changed=changed,
        files=[FileRef(key=key, bytes=len(data), sha256=manifest.sha256_hex(data))],
        created_at="",
    )
    store.create(key, data)
    store.create(layout.fold_document(folder), manifest.encode(document))
    return key


@pytest.fixture
def store(memory_url: str) -> FaultyStore:
    return FaultyStore(open_store(memory_url))


def reads(store: FaultyStore) -> list[str]:
    return [key for operation, key in store.calls if operation in ("read", "list")]


def test_a_manifest_names_the_versions_it_rests_on(store: FaultyStore) -> None:
    publish_many(store, 7, anchor_every=3)

    def chain_of(version: int) -> list[int]:
        key = layout.manifest(version)
        document = manifest.decode(store.read(key), Manifest, key)
        for link in document.chain:
            data = store.read(layout.manifest(link.version))
            found = manifest.decode(data, Manifest, "")
            assert link.manifest_sha256 == manifest.sha256_hex(data)
            assert link.fingerprint == found.fingerprint
            assert link.delta_bytes == (0 if found.delta is None else found.delta.payload_bytes)
        return [link.version for link in document.chain]

    assert [chain_of(version) for version in range(1, 8)] == [[], [1], [1, 2], [1, 2, 3], [4], [4, 5], [4, 5, 6]]


def test_a_resumed_publisher_goes_on_with_the_chain(store: FaultyStore) -> None:
    states = publish_many(store, 3)
    with Publisher(store, resume=True) as publisher:
        publisher.publish(states[0].items()).wait(60)
    key = layout.manifest(4)
    assert [link.version for link in manifest.decode(store.read(key), Manifest, key).chain] == [1, 2, 3]


def test_a_cold_start_reads_four_documents_before_weights(store: FaultyStore) -> None:
    states = publish_many(store, 60)
    store.calls.clear()
    replica = Replica(store)
    assert replica.sync() == 60
    calls = reads(store)
    before = calls[: [key.startswith("anchors/") for key in calls].index(True)]
    anchor = max(version for version in range(1, 61) if list(store.list(layout.anchor_dir(version))))
    assert anchor < 60
    assert before == ["channel.json", "head.json", layout.manifest(60), layout.manifest(anchor)]
    assert_same_bits(replica.state_dict(), states[-1])


def test_a_replica_that_is_up_to_date_reads_head_only(store: FaultyStore) -> None:
    publish_many(store, 3)
    replica = Replica(store)
    replica.sync()
    store.calls.clear()
    replica.sync()
    assert store.calls == [("read", "head.json")]


def test_a_replica_one_version_behind_reads_head_manifest_and_payload(store: FaultyStore) -> None:
    states = publish_many(store, 3)
    replica = Replica(store)
    replica.sync()
    with Publisher(store, resume=True) as publisher:
        publisher.publish(states[0].items()).wait(60)
    store.calls.clear()
    assert replica.sync() == 4
    assert reads(store) == ["head.json", layout.manifest(4), "deltas/0000000004/part-00001-of-00001.safetensors"]


@pytest.mark.parametrize("links", [0, 2])
def test_a_short_chain_or_none_is_walked(store: FaultyStore, links: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "CHAIN_LINKS", links)
    if links == 0:
        monkeypatch.setattr(Manifest, "chain_onward", _only_itself)
    states = publish_many(store, 9, anchor_every=4)
    replica = Replica(store)
    replica.sync(1)
    assert replica.sync() == 9
    assert_same_bits(replica.state_dict(), states[-1])


def _only_itself(document: Manifest, manifest_sha256: str) -> list[manifest.Link]:
    return [manifest.Link(document.version, manifest_sha256, document.fingerprint, 1)]


def test_a_chain_that_does_not_end_at_the_base_is_refused(store: FaultyStore) -> None:
    publish_many(store, 4)
    key = layout.manifest(4)
    document = manifest.decode(store.read(key), Manifest, key)
    for chain in (document.chain[:-1], [*document.chain[1:], document.chain[0]], [document.chain[1], *document.chain[1:]]):
        with pytest.raises(CorruptDataError, match="chain"):
            manifest.decode(manifest.encode(dataclasses.replace(document, chain=chain)), Manifest, key)


class TestFolds:
    def test_a_replica_far_behind_takes_a_fold(self, store: FaultyStore) -> None:
        states = publish_many(store, 20)
        write_fold(store, states, 2, 19)
        replica = Replica(store)
        replica.sync(1)
        store.calls.clear()
        assert replica.sync() == 20
        assert_same_bits(replica.state_dict(), states[-1])
        fetched = [key.split("/")[1] for key in reads(store) if key.startswith(("deltas/", "folds/0"))]
        assert sorted(fetched) == ["0000000002", "0000000002-0000000019", "0000000002-0000000019", "0000000020"]

    def test_a_cold_start_takes_it_after_the_anchor(self, store: FaultyStore) -> None:
        states = publish_many(store, 20)
        write_fold(store, states, 1, 20)
        store.calls.clear()
        replica = Replica(store)
        assert replica.sync() == 20
        assert_same_bits(replica.state_dict(), states[-1])
        assert not any(key.startswith("deltas/") for key in reads(store))

    def test_a_replica_a_little_behind_does_not_even_look_for_one(self, store: FaultyStore) -> None:
        publish_many(store, 5)
        replica = Replica(store)
        replica.sync(2)
        store.calls.clear()
        replica.sync()
        assert not any(operation == "list" for operation, _ in store.calls)

    @pytest.mark.parametrize(
        "damage", ["payload", "document", "missing payload", "wrong bits", "other run", "other version"]
    )
    def test_a_bad_fold_is_passed_by(self, store: FaultyStore, damage: str) -> None:
        states = publish_many(store, 20)
        key = write_fold(store, states if damage != "wrong bits" else [*states[:18], states[3], *states[19:]], 2, 19)
        document = layout.fold_document(key.rpartition("/")[0])
        if damage == "payload":
            store.tamper(key, flipped)
        if damage == "document":
            store.tamper(document, lambda data: data[:-10])
        if damage == "missing payload":
            store.inner.delete(key)
        if damage in ("other run", "other version"):
            fold = manifest.decode(store.read(document), Fold, document)
            change = {"run_id": "x"} if damage == "other run" else {"manifest_sha256": "0" * 64}
            store.inner.replace(document, manifest.encode(dataclasses.replace(fold, **change)))  # type: ignore[arg-type]
        replica = Replica(store)
        replica.sync(1)
        assert replica.sync() == 20
        assert_same_bits(replica.state_dict(), states[-1])
        assert len({key for key in reads(store) if key.startswith("deltas/")}) == 19

    def test_deltas_that_are_gone_are_bridged_by_a_fold(self, store: FaultyStore) -> None:
        states = publish_many(store, 20)
        write_fold(store, states, 2, 19)
        for version in range(3, 19):
            store.inner.delete(layout.manifest(version), f"{layout.delta_dir(version)}/{layout.delta_part(1, 1)}")
        replica = Replica(store)
        assert replica.sync() == 20
        assert_same_bits(replica.state_dict(), states[-1])

    def test_deltas_that_are_gone_are_passed_by_on_the_anchor(self, store: FaultyStore) -> None:
        states = publish_many(store, 12, anchor_every=8)
        replica = Replica(store)
        replica.sync(2)
        for version in range(1, 9):
            store.inner.delete(layout.manifest(version))
        assert replica.sync() == 12
        assert_same_bits(replica.state_dict(), states[-1])

    def test_what_is_gone_for_good_is_named(self, store: FaultyStore) -> None:
        publish_many(store, 4)
        replica = Replica(store)
        replica.sync(2)
        gone = f"{layout.delta_dir(3)}/{layout.delta_part(1, 1)}"
        data = store.inner.read(gone)
        store.inner.delete(gone)
        with pytest.raises(MissingVersionError, match="deltas/0000000003"):
            replica.sync()
        assert replica.version == 2
        store.inner.create(gone, data)
        assert replica.sync() == 4


class TestBatches:
    @pytest.mark.parametrize("encoding", ["packed", "context", "raw"])
    def test_several_deltas_are_one_commit(
        self, store: FaultyStore, encoding: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        states = publish_many(store, 5, encoding=encoding, dense_at=4)
        replica = Replica(store)
        replica.sync(1)
        with caplog.at_level("INFO", "deltasync.replica"):
            assert replica.sync() == 5
        assert ["steps=4" in record.getMessage() for record in caplog.records] == [True]
        assert_same_bits(replica.state_dict(), states[-1])

    def test_changes_that_cancel_out_leave_the_bits_as_they_were(self, store: FaultyStore) -> None:
        states = publish_many(store, 2)
        with Publisher(store, resume=True) as publisher:
            publisher.publish(states[0].items()).wait(60)
        replica = Replica(store)
        replica.sync(1)
        assert replica.sync() == 3
        assert_same_bits(replica.state_dict(), states[0])

    def test_batches_are_bounded(self, store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
        states = publish_many(store, 9)
        replica = Replica(store)
        replica.sync(1)
        assert replica._follower is not None
        steps = replica._follower.plan(replica._reader.head())
        monkeypatch.setattr("deltasync.replica._BATCH", 3)
        assert replica._follower.batch(steps) == steps[:3]
        monkeypatch.setattr("deltasync.replica._BATCH_BYTES", steps[0].payload_bytes + steps[1].payload_bytes)
        assert replica._follower.batch(steps) == steps[:2]
        monkeypatch.setattr("deltasync.replica._BATCH_BYTES", 0)
        assert replica._follower.batch(steps) == steps[:1]
        assert replica.sync() == 9
        assert_same_bits(replica.state_dict(), states[-1])

    def test_a_version_in_a_batch_that_does_not_give_its_bits_is_found_and_passed_by(self, store: FaultyStore) -> None:
        states = publish_many(store, 6)
        with Publisher(store, resume=True) as publisher:
            publisher._fingerprints["no such tensor"] = 1
            publisher.publish(states[0].items()).wait(60)
            del publisher._fingerprints["no such tensor"]
            for state in states[1:3]:
                publisher.publish(state.items()).wait(60)
            replica = Replica(store)
            replica.sync(1)
            with pytest.raises(FingerprintMismatchError, match="Version 7"):
                replica.sync(7)
            assert replica.version == 6
            assert_same_bits(replica.state_dict(), states[5])
            publisher.settings = dataclasses.replace(publisher.settings, anchor_every=1)
            publisher.publish(states[3].items()).wait(60)
        assert replica.sync() == 10
        assert_same_bits(replica.state_dict(), states[3])
