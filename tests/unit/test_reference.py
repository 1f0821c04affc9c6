"""Channels that start from a checkpoint that everybody has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from deltasync import Publisher, Replica, open_store, ops
from deltasync.channel import documents, keys
from deltasync.channel.documents import Channel
from deltasync.channel.reading import ChannelReader
from deltasync.errors import (
    ConfigError,
    CorruptDataError,
    DeltaSyncError,
    FormatError,
    MissingVersionError,
    ModelMismatchError,
)
from deltasync.following import Cursor, LiveWeights
from deltasync.following.identify import identify
from deltasync.live import HostMemory, model_fingerprint
from deltasync.opening import checkpoint, references
from deltasync.ops import KeepPolicy
from deltasync.ops.cli import main
from deltasync.stores import Store
from deltasync.tensors.bits import spec_of
from tests.builders import assert_holds
from tests.conftest import assert_same_bits
from tests.faults import FaultyStore
from tests.unit import test_initial
from tests.unit.test_initial import Weights, save, trained, weights

base, hub = test_initial.base, test_initial.hub


def stored_keys(store: Store) -> list[str]:
    return [info.key for info in store.list("")]


def spoil(file: str, change: Callable[[Weights], object]) -> Callable[[Path], object]:
    def spoiled(base: Path) -> None:
        tensors = {n: t.clone() for n, t in safetensors.torch.load_file(base / file).items()}
        change(tensors)
        safetensors.torch.save_file(tensors, base / file)

    return spoiled


def one_bit(tensors: Weights) -> None:
    tensors["model.layer.weight"].view(torch.int16)[3, 4] ^= 1
    tensors["model.norm.weight"].view(torch.int16)[0] ^= 1


CHANGES: dict[str, tuple[Callable[[Path], object], type[DeltaSyncError], str]] = {
    "other bits": (
        spoil("model.safetensors", one_bit),
        CorruptDataError,
        "2 of 5 tensors differ: (model.layer.weight, model.norm.weight|model.norm.weight, "
        "model.layer.weight)",
    ),
    "no tensor": (spoil("model.safetensors", lambda t: t.pop("ids")), CorruptDataError, "lacks ids"),
    "another shape": (
        spoil("model.safetensors", lambda t: t.update(ids=torch.arange(8))),
        CorruptDataError,
        r"ids as int64\[8\]",
    ),
    "another dtype": (
        spoil("model.safetensors", lambda t: t.update(ids=torch.arange(7.0))),
        CorruptDataError,
        r"ids as float32\[7\]",
    ),
    "damage": (
        lambda base: (base / "model.safetensors").write_bytes(b"x" * 100),
        CorruptDataError,
        "not a safetensors file",
    ),
    "no file": (
        lambda base: (base / "model.safetensors").unlink(),
        MissingVersionError,
        "holds neither model.safetensors",
    ),
    "no directory": (shutil.rmtree, MissingVersionError, "is not a directory on this machine"),
    "no index": (
        lambda base: (base / "model.safetensors.index.json").write_text("{"),
        CorruptDataError,
        "is not the index of a checkpoint",
    ),
    "a strange index": (
        lambda base: (base / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../x"}}'),
        CorruptDataError,
        "is not the index of a checkpoint",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_that_is_not_the_same_is_refused(memory_url: str, base: Path, change: str) -> None:
    with Publisher(memory_url, initial=base) as publisher:
        publisher.publish(weights().items()).wait(60)
    spoiled, error, said = CHANGES[change]
    spoiled(base)
    replica = Replica(memory_url)
    with pytest.raises((error, MissingVersionError), match=said):
        replica.sync()
    assert replica.version is None
    report = ops.check(ChannelReader(open_store(memory_url)), read_data=True)
    assert report.unproven == [1]
    # It is the checkpoint that is wrong, not the channel: a later anchor helps.
    with Publisher(memory_url, resume=True) as publisher:
        assert publisher.publish(weights().items()).wait(60).kind == "anchor"
    assert_holds(memory_url, weights(), 2)


def test_a_model_that_the_checkpoint_is_not_of_is_refused(memory_url: str, base: Path) -> None:
    stranger = weights() | {"model.extra.weight": torch.zeros(2, 2)}
    untied = weights()
    untied["lm_head.weight"] = untied["lm_head.weight"] + 1
    with Publisher(memory_url, initial=base) as publisher:
        with pytest.raises(ModelMismatchError, match=r"lacks model\.extra\.weight"):
            publisher.publish(stranger.items())
        with pytest.raises(ModelMismatchError, match=r"lacks lm_head\.weight"):
            publisher.publish(untied.items())
        assert publisher.publish(weights().items()).wait(60).version == 1


class TestIdentify:
    @pytest.fixture
    def channel(self, memory_url: str, base: Path) -> tuple[Store, Weights]:
        """More versions than are looked at, and the weights of the newest."""
        state = weights()
        with Publisher(memory_url, initial=base) as publisher:
            for seed in range(12):
                publisher.publish(state.items()).wait(60)
                state = trained(state, seed) if seed < 11 else state
        return open_store(memory_url), state

    def follower(self, store: Store, state: Weights) -> tuple[LiveWeights, Cursor]:
        reader = ChannelReader(store)
        memory, tensors = HostMemory.on_host(reader.specs)
        for name, tensor in tensors.items():
            tensor.copy_(state[name])
        memory.audit()
        follower, cursor = LiveWeights(reader, memory), Cursor(reader)
        follower.identified(identify(cursor.reader, cursor.locate(), model_fingerprint(memory.fingerprints)))
        return follower, cursor

    def advance(self, follower: LiveWeights, cursor: Cursor) -> int:
        while way := cursor.next(follower.version):
            follower.confirm(follower.commit(follower.stage(way)))
        assert follower.version is not None
        return follower.version.version

    def test_the_loaded_checkpoint_is_recognised_and_only_deltas_are_read(
        self, channel: tuple[Store, Weights], base: Path
    ) -> None:
        store, newest = channel
        shutil.rmtree(base)
        follower, cursor = self.follower(store, weights())
        assert follower.version == ChannelReader(store).numbered(1).version
        assert self.advance(follower, cursor) == 12
        again, _ = self.follower(store, newest)
        assert again.version == follower.version
        assert follower.memory.fingerprints == again.memory.fingerprints

    def test_other_weights_load_the_checkpoint_or_say_which_tensors_differ(
        self, channel: tuple[Store, Weights], base: Path
    ) -> None:
        store, newest = channel
        state = weights()
        state["model.norm.weight"][3] = 2.0
        follower, cursor = self.follower(store, state)
        assert follower.version is None
        reference = ChannelReader(store).numbered(1).record.reference
        assert reference is not None
        assert references.unlike(follower.reader, reference, follower.memory.fingerprints) == (
            f"The weights here are not those of {base}: 1 of 5 tensors differ: model.norm.weight."
        )
        store.delete(*(info.key for info in store.list(keys.ANNOUNCEMENTS)))
        moved = base.rename(base.parent / "moved")
        with pytest.raises(MissingVersionError, match="which this machine cannot load"):
            self.advance(follower, cursor)
        moved.rename(base)
        follower, cursor = self.follower(store, state)
        assert self.advance(follower, cursor) == 12
        assert follower.memory.fingerprints == self.follower(store, newest)[0].memory.fingerprints

    def test_a_replica_is_told_where_the_checkpoint_lies(
        self, channel: tuple[Store, Weights], base: Path
    ) -> None:
        store, newest = channel
        moved = base.rename(base.parent / "moved")
        replica = Replica(store)
        with pytest.raises(ConfigError, match="is not a directory"):
            replica.load(base)
        assert replica.load(moved) == 1
        assert_same_bits(replica.state_dict(), weights())
        shutil.rmtree(moved)
        assert replica.sync() == 12
        assert_same_bits(replica.state_dict(), newest)


def kept(reader: ChannelReader, keep: KeepPolicy) -> list[int]:
    plan = ops.gc(reader, keep, grace_s=0.0, dry_run=True).plan
    assert plan is not None
    return [slot.version for slot in plan.kept]


class TestHousekeeping:
    @pytest.fixture
    def url(self, tmp_path: Path, base: Path) -> str:
        url, state = f"file://{tmp_path}/channel", weights()
        with Publisher(url, initial=base, anchor_every=5) as publisher:
            for seed in range(7):  # versions 1 and 6 have anchors
                publisher.publish(state.items(), step=seed).wait(60)
                state = trained(state, seed)
        return url

    def test_nothing_is_deleted_that_is_needed_and_what_leads_to_kept_versions_stays(self, url: str) -> None:
        reader = ChannelReader(open_store(url))
        before = stored_keys(reader.store)
        ops.gc(reader, grace_s=0.0)
        assert stored_keys(reader.store) == before
        assert kept(reader, KeepPolicy(anchors=2)) == [1, 6, 7]
        assert kept(reader, KeepPolicy(step_every=3)) == [1, 2, 3, 4, 6, 7]
        ops.gc(reader, KeepPolicy(last=1), grace_s=0.0)
        assert ops.check(ChannelReader(reader.store), read_data=True).problems == []
        assert [slot.version for slot, _ in ChannelReader(reader.store).slots()] == [6, 7]

    def test_a_copy_refers_to_the_same_checkpoint(self, url: str, memory_url: str) -> None:
        ops.copy(ChannelReader(open_store(url)), open_store(memory_url))
        assert stored_keys(open_store(memory_url)) == stored_keys(open_store(url))
        assert_holds(memory_url, weights(), 1)

    def test_an_export_takes_config_and_tokenizer_from_the_checkpoint(
        self, url: str, base: Path, tmp_path: Path
    ) -> None:
        for version in (2, 7):
            ops.export(ChannelReader(open_store(url)), version, tmp_path / f"{version}")
            assert sorted(path.name for path in (tmp_path / f"{version}").iterdir()) == [
                "config.json",
                "model.safetensors",
            ]
        shutil.rmtree(base)
        ops.export(ChannelReader(open_store(url)), 7, tmp_path / "without")
        assert [path.name for path in (tmp_path / "without").iterdir()] == ["model.safetensors"]

    def test_compactions_from_the_reference(self, url: str, base: Path) -> None:
        reader = ChannelReader(open_store(url))
        ops.write_compaction(reader, 1, 5)
        report = ops.check(ChannelReader(reader.store), read_data=True)
        assert (report.problems, report.anchors, report.compactions) == ([], 2, 1)

    def test_log_and_show_name_the_checkpoint(self, url: str, base: Path) -> None:
        def said(*arguments: str) -> str:
            result = CliRunner().invoke(main, arguments)
            assert result.exit_code == 0, result.output
            return result.output

        rows = [json.loads(line) for line in said("log", url, "--json").splitlines()]
        assert [row["reference"] for row in rows] == [str(base)] + [None] * 7, (
            "seven versions, and full weights of the sixth"
        )
        assert [row["kind"] for row in rows] == ["anchor", *["delta"] * 5, "announced", "delta"]
        assert "reference" in said("log", url)
        assert str(base) in said("log", url, "1")
        assert "proven        the bits of 7 versions" in said("check", url, "--read-data")


def test_readers_that_do_not_know_references_refuse(
    memory_url: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Publisher(memory_url, initial=base) as publisher:
        publisher.publish(weights().items()).wait(60)
    monkeypatch.setattr(documents, "FEATURES", frozenset())
    with pytest.raises((FormatError, MissingVersionError), match="requires reference"):
        Replica(memory_url).sync()


def test_a_reference_to_other_tensors_than_the_channels_is_refused(memory_url: str, base: Path) -> None:
    with Publisher(memory_url, initial=base) as publisher:
        publisher.publish(weights().items()).wait(60)
    store = FaultyStore(open_store(memory_url))
    table = {"ids": ("int64", (7,))}

    def shortened(data: bytes) -> bytes:
        document = json.loads(data)
        document |= {"tensors": table, "tensors_sha256": documents.table_sha256(table)}  # type: ignore[arg-type]
        return json.dumps(document).encode()

    store.tamper(keys.CHANNEL, shortened)
    assert documents.decode(store.read(keys.CHANNEL, 1 << 20), Channel, keys.CHANNEL).tensors == table
    with pytest.raises((CorruptDataError, MissingVersionError), match="does not name the channel's tensors"):
        Replica(store).sync()


def test_a_trainer_whose_checkpoint_is_older_than_the_head_goes_on_right(channel_url: str) -> None:
    """Its weights go back; the versions do not."""
    states = [weights()]
    for seed in range(1, 4):
        states.append(trained(states[-1], seed))
    with Publisher(channel_url) as publisher:
        for step, state in enumerate(states):
            publisher.publish(state.items(), step=step).wait(60)
    follower = Replica(channel_url)
    follower.sync()
    with Publisher(channel_url, resume=True) as publisher:
        version = publisher.version
        for state, step in ((states[1], 1), (trained(states[1], 9), 2)):
            receipt = publisher.publish(state.items(), step=step).wait(60)
            assert receipt.kind == "delta"
            assert follower.sync() == receipt.version
            assert_same_bits(follower.state_dict(), state)
            assert_holds(channel_url, state, receipt.version)
        assert receipt.version == version + 2
    for version, state in enumerate(states, start=1):  # nothing of what was published before changed
        assert_holds(channel_url, state, version)


def test_find_and_load_read_only_what_they_need(tmp_path: Path) -> None:
    """Tensors that the channel does not have are not read: here they could not be."""
    base = save(tmp_path / "base", files=5)
    index = json.loads((base / "model.safetensors.index.json").read_text())["weight_map"]
    (base / index["model.vision.weight"]).write_bytes(b"not safetensors")
    found = checkpoint.load(checkpoint.find(base))
    specs = {name: spec_of(name, tensor) for name, tensor in weights().items() if name != "lm_head.weight"}
    assert {name for name, _ in found.read(specs)} == specs.keys()
