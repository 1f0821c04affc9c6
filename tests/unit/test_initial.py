"""A first version that is a checkpoint that everybody has: what a publisher makes of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import safetensors.torch
import torch

from deltasync import Publisher, Replica, open_store
from deltasync.channel import keys
from deltasync.channel.documents import Record
from deltasync.channel.reading import ChannelReader
from deltasync.config import Retention
from deltasync.errors import ConfigError, MissingVersionError, PublishError
from deltasync.stores import Store
from tests.builders import assert_holds, finish_maintenance
from tests.faults import FOREVER, FaultyStore

Weights = dict[str, torch.Tensor]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def weights() -> Weights:
    random = torch.Generator().manual_seed(0)
    embed = torch.randn(40, 30, generator=random)
    return {
        "model.embed.weight": embed.to(torch.bfloat16),
        "model.layer.weight": torch.randn(30, 30, generator=random).to(torch.bfloat16),
        "model.norm.weight": torch.ones(30, dtype=torch.bfloat16),
        "lm_head.weight": embed.to(torch.bfloat16),
        "ids": torch.arange(7),
    }


def trained(before: Weights, seed: int) -> Weights:
    random = torch.Generator().manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in before.items()}
    for name in ("model.embed.weight", "model.layer.weight"):
        bits = after[name].view(torch.int16)
        bits += (torch.rand(bits.shape, generator=random) < 0.02).to(torch.int16)
    after["lm_head.weight"] = after["model.embed.weight"].clone()
    return after


def save(folder: Path, dtype: torch.dtype = torch.bfloat16, files: int = 1) -> Path:
    """A checkpoint as transformers saves it: without the tied head, perhaps in several files, perhaps in
    another dtype.
    """
    kept = {
        n: t.to(dtype) if t.is_floating_point() else t for n, t in weights().items() if n != "lm_head.weight"
    }
    kept["model.vision.weight"] = torch.zeros(3)  # that nobody trains
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    names = list(kept)
    if files == 1:
        safetensors.torch.save_file(kept, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {
        name: f"model-{number % files + 1:05}-of-{files:05}.safetensors" for number, name in enumerate(names)
    }
    for file in set(weight_map.values()):
        safetensors.torch.save_file(
            {n: kept[n] for n in names if weight_map[n] == file}, folder / file, {"format": "pt"}
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save(tmp_path / "base")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the Hub's client with one model; the tests run with HF_HUB_OFFLINE."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "hub" / "models--some--model"
    save(model / "snapshots" / COMMIT, files=2)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    return model / "snapshots" / COMMIT


def read(store: Store, version: int) -> Record:
    return ChannelReader(store).numbered(version).record


def stored(store: Store) -> list[str]:
    """All keys, but for the one that tells who opened the channel."""
    return [info.key for info in store.list("") if not info.key.startswith(keys.EPOCHS)]


def anchors(store: Store) -> list[int]:
    """Versions that have an anchor beside the log."""
    return [span.version for span, _ in ChannelReader(store).announcements()]


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_nothing_is_uploaded_before_the_first_delta(
    channel_url: str, tmp_path: Path, dtype: torch.dtype, files: int
) -> None:
    states = [weights()]
    states += [trained(states[-1], 1)]
    states += [trained(states[-1], 2)]
    base = save(tmp_path / "base", dtype, files)
    with Publisher(channel_url, initial=base) as publisher:
        first = publisher.publish(states[0].items(), step=0).wait(60)
        store = open_store(channel_url)
        assert [key for key in stored(store) if key != keys.HEAD] == [
            keys.CHANNEL,
            ChannelReader(store).numbered(1).key,
        ]
        assert (first.version, first.kind, first.payload_bytes, first.anchor_bytes) == (1, "anchor", 0, 0)
        receipts = [publisher.publish(state.items()).wait(60) for state in states[1:]]
    assert [(receipt.version, receipt.kind) for receipt in receipts] == [(2, "delta"), (3, "delta")]
    document = read(store, 1)
    assert document.reference is not None
    assert document.reference.path == str(base) and document.reference.tied == {
        "lm_head.weight": "model.embed.weight"
    }
    assert document.requires == ["reference"] and document.step == 0
    assert not any(key.startswith(keys.ANCHORS) for key in stored(store))
    for version, state in enumerate(states, start=1):
        assert_holds(channel_url, state, version)


def test_a_stream_with_other_bits_is_the_second_version(channel_url: str, base: Path) -> None:
    state = trained(weights(), 1)
    with Publisher(channel_url, initial=base) as publisher:
        receipt = publisher.publish(state.items(), step=5)
        assert publisher.version == 2
        receipt.wait(60)
        assert (receipt.version, receipt.kind) == (2, "delta") and 0 < receipt.changed < receipt.total / 10
    store = open_store(channel_url)
    assert (read(store, 1).step, read(store, 2).step) == (None, 5)
    assert_holds(channel_url, weights(), 1)
    assert_holds(channel_url, state, 2)


def test_publishes_join_what_waits_behind_the_reference(memory_url: str, base: Path) -> None:
    """While the channel is being created, two more streams come; after a changed first one and after an equal
    one.
    """
    for changed in (False, True):
        url = f"{memory_url}-{changed}"
        store = FaultyStore(open_store(url))
        gate = store.hold_at("create", keys.CHANNEL)
        states = [trained(weights(), 1) if changed else weights()]
        states += [trained(states[-1], 2)]
        states += [trained(states[-1], 3)]
        with Publisher(store, initial=base) as publisher:
            receipts = [publisher.publish(states[0].items())]
            assert gate.entered.wait(60)
            receipts += [publisher.publish(state.items()) for state in states[1:]]
            gate.opened.set()
            publisher.flush(60)
        newest = publisher.version
        assert all(receipt.done for receipt in receipts)
        assert_holds(url, weights(), 1)
        assert_holds(url, states[-1], newest)


@pytest.mark.parametrize("key", [keys.CHANNEL, keys.VERSIONS])
def test_a_store_that_is_away_at_the_start_costs_no_anchor(memory_url: str, base: Path, key: str) -> None:
    store = FaultyStore(open_store(memory_url))
    states = [trained(weights(), 1), trained(weights(), 2)]
    publisher = Publisher(store, initial=base, retries=0)
    store.fail_at("create", key, times=FOREVER)
    with pytest.raises(PublishError):
        publisher.publish(states[0].items()).wait(60)
    store.heal()
    receipt = publisher.publish(states[1].items()).wait(60)
    publisher.close()
    assert (receipt.version, receipt.kind) == (2, "delta")
    assert read(store, 1).reference is not None
    assert_holds(store, weights(), 1)
    assert_holds(store, states[1], 2)


def test_a_delta_on_the_reference_that_is_lost_costs_an_anchor(memory_url: str, base: Path) -> None:
    with Publisher(memory_url, initial=base) as publisher:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("deltasync.publish.encode.encode", lambda *_: 1 / 0)
            with pytest.raises(PublishError):
                publisher.publish(trained(weights(), 1).items()).wait(60)
        receipt = publisher.publish(trained(weights(), 2).items()).wait(60)
    assert (receipt.version, receipt.kind) == (2, "anchor")
    assert_holds(memory_url, weights(), 1)
    assert_holds(memory_url, trained(weights(), 2), 2)


def test_a_channel_by_reference_is_resumed(channel_url: str, base: Path) -> None:
    states = [weights()]
    with Publisher(channel_url, initial=base) as publisher:
        publisher.publish(states[0].items()).wait(60)
    for seed in (1, 2):
        states += [trained(states[-1], seed)]
        with Publisher(channel_url, initial="not/looked@at", resume=True) as publisher:
            assert publisher.publish(states[-1].items()).wait(60).kind == "delta"
    for version, state in enumerate(states, start=1):
        assert_holds(channel_url, state, version)


def test_anchors_after_a_reference(memory_url: str, base: Path) -> None:
    """By number only if that was asked for."""

    def publish(url: str, count: int, state: Weights, **settings: int) -> list[int]:
        number = 0
        for part in (count // 2, count - count // 2):  # the second half resumed
            with Publisher(url, initial=base, resume=True, **settings) as publisher:  # type: ignore[arg-type]
                for _ in range(part):
                    publisher.publish(state.items()).wait(60)
                    finish_maintenance(publisher)
                    number += 1
                    state = trained(state, number)
        return anchors(open_store(url))

    assert publish(f"{memory_url}1", 7, weights()) == []
    assert publish(f"{memory_url}2", 7, weights(), anchor_every=3) == [4, 7]


class TestHub:
    def test_a_model_is_pinned_to_a_commit(self, memory_url: str, hub: Path) -> None:
        for number, named in enumerate(("some/model", "some/model@main", f"some/model@{COMMIT}")):
            url = f"{memory_url}{number}"
            with Publisher(url, initial=named) as publisher:
                publisher.publish(weights().items()).wait(60)
                publisher.publish(trained(weights(), 1).items()).wait(60)
            reference = read(open_store(url), 1).reference
            assert reference is not None
            assert (reference.repo, reference.revision, reference.path) == ("some/model", COMMIT, None)
            assert_holds(url, trained(weights(), 1), 2)

    @pytest.mark.parametrize(
        "named", ["some/other", "some/model@v2", "some/model@", "no model", "/no/such/directory", "./x/y"]
    )
    def test_what_is_not_there_is_one_sentence_before_anything_is_published(
        self, memory_url: str, hub: Path, named: str
    ) -> None:
        with pytest.raises(ConfigError) as error:
            Publisher(memory_url, initial=named)
        assert "\n" not in str(error.value) and named.split("@")[0] in str(error.value)
        assert stored(open_store(memory_url)) == []

    def test_a_replica_without_the_model_says_so(self, memory_url: str, hub: Path) -> None:
        with Publisher(memory_url, initial="some/model") as publisher:
            publisher.publish(weights().items()).wait(60)
        (hub / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(MissingVersionError, match=f"some/model@{COMMIT}.*lacks model-00002"):
            Replica(memory_url).sync()
        shutil.rmtree(hub.parents[1])
        with pytest.raises(MissingVersionError, match=f"some/model@{COMMIT}.*is neither on the Hub"):
            Replica(memory_url).sync()


def test_a_publisher_that_keeps_house_goes_by_the_reference(memory_url: str, base: Path) -> None:
    state = weights()
    with Publisher(memory_url, initial=base, retention=Retention(compact_every=2)) as publisher:
        for seed in range(7):
            publisher.publish(state.items()).wait(60)
            finish_maintenance(publisher)
            state = trained(state, seed)
    spans = [(span.base, span.version) for span, _ in ChannelReader(open_store(memory_url)).compactions()]
    assert spans == [(1, 3), (1, 5), (1, 7)]


def test_a_joiner_of_a_base_that_was_overwritten_logs_its_reason_once_and_raises_it(
    memory_url: str, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = safetensors.torch.load_file(base / "model.safetensors")
    with Publisher(memory_url, initial=base) as publisher:
        for _ in range(3):
            publisher.publish(weights).wait(60)
            weights = {name: tensor + 1 for name, tensor in weights.items()}
        safetensors.torch.save_file(weights, base / "model.safetensors")
        with pytest.raises(MissingVersionError, match="is not version 1"):
            Replica(memory_url).sync()
    reasons = [record.getMessage() for record in caplog.records if "is not version 1" in record.getMessage()]
    assert [text.partition(":")[2].partition(":")[0].strip() for text in reasons] == [
        "CorruptDataError",
        "MissingVersionError",
    ]


@pytest.mark.parametrize("closes", [True, False])
def test_a_base_that_a_short_run_overwrites_is_told_at_its_end(
    tmp_path: Path, base: Path, closes: bool
) -> None:
    """As where a trainer saves its last weights into the directory that it began from; with `close` and
    without it.
    """
    code = f"""
import safetensors.torch
from deltasync import Publisher
path = {str(base / "model.safetensors")!r}
weights = safetensors.torch.load_file(path)
publisher = Publisher({f"file://{tmp_path}/channel"!r}, initial={str(base)!r})
for _ in range(2):
    publisher.publish(weights).wait(60)
    weights = {{name: tensor + 1 for name, tensor in weights.items()}}
safetensors.torch.save_file(weights, path)
{"publisher.close()" if closes else ""}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was overwritten during the run") == 1
    with Publisher(f"file://{tmp_path}/channel", resume=True) as publisher:  # the cure that it names
        last = safetensors.torch.load_file(base / "model.safetensors")
        assert publisher.publish(last).wait(60).kind == "anchor"
    served = {
        name: held.to(torch.bfloat16) if held.is_floating_point() else held for name, held in last.items()
    }
    assert_holds(f"file://{tmp_path}/channel", served)
