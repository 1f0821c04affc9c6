from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.optim.swa_utils import AveragedModel

from deltasync import Publisher, Receipt, Replica, open_store
from deltasync.channel import keys
from deltasync.channel.documents import Record
from deltasync.channel.reading import ChannelReader
from deltasync.codec.vector import VectorCodec
from deltasync.errors import (
    AckTimeoutError,
    ChannelInUseError,
    ConfigError,
    FencedError,
    ModelMismatchError,
    PublishError,
    PublishPendingError,
    StoreError,
)
from deltasync.stores import Store
from tests import builders
from tests.builders import Weights, assert_holds, finish_maintenance
from tests.conftest import assert_same_bits
from tests.faults import FOREVER, FaultyStore


def _record(store: Store, version: int) -> Record:
    return ChannelReader(store).numbered(version).record


def _versions(store: Store) -> list[int]:
    return sorted(version.version for version in ChannelReader(store).versions())


def _anchors(store: Store) -> list[int]:
    """Versions that have an anchor beside the log."""
    return [span.version for span, _ in ChannelReader(store).announcements()]


@pytest.fixture
def store(memory_url: str) -> FaultyStore:
    return FaultyStore(open_store(memory_url))


@pytest.mark.parametrize("codec", ["packed", "context", "raw"])
def test_every_version_has_exactly_the_published_bits(channel_url: str, codec: str) -> None:
    states = [builders.weights()]
    states += [builders.trained(states[-1], 1)]
    states += [builders.trained(states[-1], 2)]
    states += [states[-1]]  # nothing changed
    states += [builders.trained(states[-1], 3, fraction=1.0)]  # all of it
    states += [builders.trained(states[-1], 4)]
    weight_bytes = sum(tensor.nbytes for tensor in states[0].values())
    with Publisher(channel_url, codec=codec) as publisher:
        receipts = [builders.publish(publisher, state, step=10 * step) for step, state in enumerate(states)]
        assert publisher.version == len(states)
        assert publisher.shadow_bytes == {"host": weight_bytes, "device": 0}
    assert [receipt.version for receipt in receipts] == list(range(1, len(states) + 1))
    assert receipts[0].kind == "anchor"
    assert receipts[0].changed == receipts[0].total
    assert receipts[3].changed == 0
    assert receipts[3].payload_bytes == 0
    assert receipts[3].bits_per_changed is None
    assert all(receipt.done for receipt in receipts)

    store = open_store(channel_url)
    assert [_record(store, version).step for version in _versions(store)] == [0, 10, 20, 30, 40, 50]

    follower, late = Replica(channel_url), Replica(channel_url)
    for version, state in enumerate(states, start=1):
        assert follower.sync(version) == version
        assert follower.version == version
        assert_same_bits(follower.state_dict(), state)
    assert late.sync() == len(states)
    assert_same_bits(late.state_dict(), states[-1])
    for version in (2, 1, 5):  # and back, and forth
        late.sync(version)
        assert_same_bits(late.state_dict(), states[version - 1])


def test_receipts_count_what_changed(memory_url: str) -> None:
    first = {"w": torch.zeros(1000, dtype=torch.bfloat16)}
    second = {"w": torch.zeros(1000, dtype=torch.bfloat16)}
    second["w"][[3, 500]] = torch.tensor([1.0, -0.0], dtype=torch.bfloat16)
    with Publisher(memory_url) as publisher:
        builders.publish(publisher, first)
        receipt = builders.publish(publisher, second, step=9)
    assert (receipt.changed, receipt.total, receipt.step) == (2, 1000, 9)
    assert receipt.changed_fraction == 0.002
    assert receipt.bits_per_changed == 8 * receipt.payload_bytes / 2
    assert receipt.encode_s > 0


def test_tied_tensors_are_carried_under_both_names(channel_url: str) -> None:
    shared = torch.zeros(8, 4, dtype=torch.bfloat16)
    weights = {"embed": shared, "head": shared, "transposed": shared.T}
    with Publisher(channel_url) as publisher:
        builders.publish(publisher, weights)
        shared[3, 1] = 2.0
        receipt = builders.publish(publisher, weights)
    assert receipt.changed == 3
    assert_holds(channel_url, weights)


def test_floats_of_16_bits_are_kept_and_wider_ones_are_rounded_to_bfloat16(memory_url: str) -> None:
    weights = {
        "single": torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, float("nan"), -0.0]),
        "half": torch.tensor([1.5], dtype=torch.float16, requires_grad=True),
        "quantized": torch.tensor([1.0]).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False]),
    }
    with Publisher(memory_url) as publisher:
        builders.publish(publisher, weights)
    replica = Replica(memory_url)
    replica.sync()
    assert_same_bits(replica.state_dict(), weights | {"single": weights["single"].to(torch.bfloat16)})
    assert replica.state_dict()["single"][:2].tolist() == [1.0, 1.015625]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stream", ["mapping", "generator"])
def test_the_channel_has_the_trainers_dtype_of_16_bits(
    memory_url: str, dtype: torch.dtype, stream: str
) -> None:
    weights = {"w": torch.randn(9, 5).to(dtype), "router.e_score_correction_bias": torch.randn(3)}
    served = weights | ({"w": weights["w"].to(torch.bfloat16)} if dtype is torch.float32 else {})
    for resumed in (False, True):
        with Publisher(memory_url, resume=resumed) as publisher:
            for _ in range(2):
                weights["w"] += 1.0
                served["w"] = weights["w"].to(served["w"].dtype, copy=True)
                publisher.publish(weights if stream == "mapping" else iter(weights.items())).wait(60)
                assert_holds(memory_url, served)


@pytest.mark.parametrize("dtype", ["keep", "float16", "float32"])
def test_the_served_dtype_is_a_setting(memory_url: str, dtype: str) -> None:
    weights = {"w": torch.tensor([1.0, 2.5], dtype=torch.float64)}
    with Publisher(memory_url, dtype=dtype) as publisher:
        builders.publish(publisher, weights)
    replica = Replica(memory_url)
    replica.sync()
    expected = weights["w"] if dtype == "keep" else weights["w"].to(getattr(torch, dtype))
    assert_same_bits(replica.state_dict(), {"w": expected})


@pytest.mark.parametrize("initial", [False, True])
def test_tensors_have_dtypes_by_pattern(memory_url: str, initial: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {
        "layers.0.router.weight": torch.randn(8, 16),
        "layers.0.router.scale": torch.randn(8),
        "layers.0.up.weight": torch.randn(16, 16),
        "layers.0.rows": torch.arange(4),
    }
    save_file(weights, tmp_path / "model.safetensors")
    rule = "bfloat16,*.router.*=float32,*.scale=keep"
    served = weights | {"layers.0.up.weight": weights["layers.0.up.weight"].to(torch.bfloat16)}
    with Publisher(memory_url, dtype=rule, initial=tmp_path if initial else None) as publisher:
        builders.publish(publisher, weights)
        replica = Replica(memory_url)
        replica.sync()
        assert_same_bits(replica.state_dict(), served)
        # A step that bfloat16 does not show: the router's bits change, the matrix's do not.
        for name in ("layers.0.router.weight", "layers.0.up.weight"):
            weights[name].view(torch.int32)[0, 0] ^= 1
        served["layers.0.up.weight"] = weights["layers.0.up.weight"].to(torch.bfloat16)
        assert builders.publish(publisher, weights).changed == 1
    replica.sync()
    assert_same_bits(
        replica.state_dict(), served | {"layers.0.router.weight": weights["layers.0.router.weight"]}
    )
    with pytest.raises(ChannelInUseError, match="published in bfloat16,"):
        Publisher(memory_url, resume=True, dtype="bfloat16")
    for same in (rule, None):
        with Publisher(memory_url, resume=True, dtype=same) as publisher:
            assert builders.publish(publisher, weights).changed == 0


@pytest.mark.parametrize(
    "dtype", ["int8", "bfloat16,", "bfloat16,*.router.*", "bfloat16,a=fp8", "fp8,a=float32", "bfloat16 "]
)
def test_a_rule_of_dtypes_that_says_nothing_is_refused(memory_url: str, dtype: str) -> None:
    with pytest.raises(ConfigError, match="with patterns of names"):
        Publisher(memory_url, dtype=dtype)


def test_tensors_may_change_as_soon_as_publish_returns(store: FaultyStore) -> None:
    gate = store.hold_at("put", keys.ANCHORS)
    weights = builders.weights()
    expected = {name: tensor.clone() for name, tensor in weights.items()}
    with Publisher(store) as publisher:
        publisher.publish(weights.items())
        for tensor in weights.values():
            tensor.zero_()
        gate.opened.set()
    assert_holds(store, expected)


def test_anchor_every_counts_versions(memory_url: str) -> None:
    weights = builders.weights()
    with Publisher(memory_url, anchor_every=3) as publisher:
        receipts = []
        for seed in range(7):
            receipts.append(builders.publish(publisher, weights := builders.trained(weights, seed)))
            finish_maintenance(publisher)
    assert [receipt.kind for receipt in receipts] == ["anchor"] + ["delta"] * 6
    assert [receipt.anchor_bytes > 0 for receipt in receipts] == [True] + [False] * 6
    store = open_store(memory_url)
    assert _anchors(store) == [4, 7]
    assert _record(store, 4).delta is not None


def test_resume_of_an_empty_channel_is_a_fresh_start(channel_url: str) -> None:
    with Publisher(channel_url, resume=True) as publisher:
        assert publisher.run_id is None
        assert builders.publish(publisher, builders.weights()).version == 1


def test_resume_goes_on_with_the_next_version_as_a_delta(channel_url: str) -> None:
    states = [builders.weights()]
    states += [builders.trained(states[-1], 1)]
    states += [builders.trained(states[-1], 2)]
    with Publisher(channel_url) as publisher:
        builders.publish(publisher, states[0])
        builders.publish(publisher, states[1])
    with Publisher(channel_url, resume=True) as resumed:
        assert resumed.run_id == publisher.run_id
        assert resumed.version == 2
        receipt = builders.publish(resumed, states[2])
    assert (receipt.version, receipt.kind) == (3, "delta")
    assert receipt.changed < receipt.total / 10
    assert_holds(channel_url, states[2])


def test_resume_counts_the_chain_it_continues(memory_url: str) -> None:
    weights = builders.weights()
    for seed in range(7):
        with Publisher(memory_url, anchor_every=3, resume=True) as publisher:
            builders.publish(publisher, weights := builders.trained(weights, seed))
    assert _anchors(open_store(memory_url)) == [4, 7]


@pytest.mark.parametrize("joined", [True, False])
def test_full_weights_that_wait_behind_a_version_without_an_answer_end_their_receipts(
    store: FaultyStore, joined: bool
) -> None:
    """Their size is known before they are stored. Seeds of the simulator waited for ever for such a receipt,
    or to close.
    """
    states = [builders.weights()]
    for seed in range(4):
        states += [builders.trained(states[-1], seed)]
    publisher = Publisher(store, retries=0)
    builders.publish(publisher, states[0])
    store.fail_at("create", keys.VERSIONS, times=99)
    for state in states[1:3]:
        with pytest.raises(PublishPendingError):
            builders.publish(publisher, state)
    store.heal()
    store.fail_at("create", keys.VERSIONS, times=99, error=StoreError)
    with pytest.raises(PublishError):  # the next one has full weights
        builders.publish(publisher, states[3])
    store.heal()
    store.fail_at("create", keys.VERSIONS, times=99)
    receipt = publisher.publish(states[3].items())
    assert receipt.kind == "anchor"
    with pytest.raises(PublishPendingError):
        receipt.wait(60)
    store.heal()
    if joined:
        assert builders.publish(publisher, states[4]).version == 3

    def close() -> None:
        with contextlib.suppress(PublishPendingError):  # of the receipt that was told so
            publisher.close()

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    replica = Replica(store)
    for version, state in ((2, states[1]), (3, states[4] if joined else states[3])):
        assert replica.sync(version) == version
        assert_same_bits(replica.state_dict(), state)


@pytest.mark.parametrize("codec", ["packed", "context"])
def test_versions_that_cannot_be_uploaded_in_time_coalesce(store: FaultyStore, codec: str) -> None:
    states = [builders.weights()]
    states += [builders.trained(states[-1], seed) for seed in range(1, 7)]
    for number in range(2, 7):
        states[number] = builders.trained(states[number - 1], number)
    publisher = Publisher(store, codec=codec)
    builders.publish(publisher, states[0])
    gate = store.hold_at("create", keys.VERSIONS)
    receipts = [publisher.publish(states[1].items(), step=1)]
    assert gate.entered.wait(60)
    for step in range(2, 7):
        receipts.append(publisher.publish(states[step].items(), step=step))
        # the only one beside the one under way
        assert [job.version for job in publisher._uploader.waiting] == [3]
    assert [receipt.version for receipt in receipts] == [2, 3, 3, 3, 3, 3]
    assert [receipt.coalesced for receipt in receipts] == [1, 1, 2, 3, 4, 5]
    assert not any(receipt.done for receipt in receipts)
    with pytest.raises(AckTimeoutError) as late:
        publisher.flush(timeout_s=0.01)
    assert isinstance(late.value, TimeoutError)
    gate.opened.set()
    publisher.close()
    assert all(receipt.done for receipt in receipts)
    assert _versions(store) == [1, 2, 3]
    assert (_record(store, 3).coalesced, _record(store, 3).step) == (5, 6)
    replica = Replica(store)
    for version, state in ((2, states[1]), (3, states[6])):
        replica.sync(version)
        assert_same_bits(replica.state_dict(), state)


def test_what_waits_when_the_process_ends_is_stored(store: FaultyStore) -> None:
    states = [builders.weights()]
    for seed in (1, 2):
        states.append(builders.trained(states[-1], seed))
    publisher = Publisher(store)
    builders.publish(publisher, states[0])
    gate = store.hold_at("create", keys.VERSIONS)
    running = publisher.publish(states[1].items())
    assert gate.entered.wait(60)
    waiting = publisher.publish(states[2].items())
    threading.Timer(0.2, gate.opened.set).start()
    publisher._uploader.finish()
    assert [receipt.wait(0).version for receipt in (running, waiting)] == [2, 3]
    assert_holds(store, states[2])


def _midway(weights: Weights, failure: str) -> Iterator[tuple[str, torch.Tensor]]:
    items = list(weights.items())
    yield from items[:2]
    if failure == "raises":
        raise RuntimeError("the stream broke")
    if failure == "wrong shape":
        yield items[2][0], torch.ones(31, dtype=torch.bfloat16)
    elif failure == "wrong dtype":
        yield items[2][0], torch.ones(30, dtype=torch.int16)
    elif failure == "unsupported dtype":
        yield items[2][0], torch.ones(30, dtype=torch.complex64)
    elif failure == "wrong name":
        yield "norm.bias", items[2][1]
    elif failure == "twice":
        yield items[0]
    if failure != "ends early":
        yield from items[3:]


_FAILURES = {
    "raises": RuntimeError,
    "wrong shape": ModelMismatchError,
    "wrong dtype": ModelMismatchError,
    "unsupported dtype": ModelMismatchError,
    "wrong name": ModelMismatchError,
    "twice": ModelMismatchError,
    "ends early": ModelMismatchError,
}


@pytest.mark.parametrize("failure", _FAILURES)
def test_a_stream_that_fails_publishes_nothing_and_the_next_one_is_right(
    memory_url: str, failure: str
) -> None:
    first = builders.weights()
    wrong, second = (builders.trained(first, seed) for seed in (1, 2))
    with Publisher(memory_url) as publisher:
        builders.publish(publisher, first)
        with pytest.raises(_FAILURES[failure]):
            publisher.publish(_midway(wrong, failure))
        assert publisher.version == 1
        unchanged = builders.publish(publisher, first)
        assert (unchanged.version, unchanged.changed) == (2, 0)
        builders.publish(publisher, second)
    assert _versions(open_store(memory_url)) == [1, 2, 3]
    assert_holds(memory_url, second)


@pytest.mark.parametrize("failure", ["raises", "twice", "unsupported dtype"])
def test_a_first_stream_that_fails_leaves_the_channel_unused(memory_url: str, failure: str) -> None:
    with Publisher(memory_url) as publisher:
        with pytest.raises(_FAILURES[failure]):
            publisher.publish(_midway(builders.weights(), failure))
        assert publisher.run_id is None
        builders.publish(publisher, {"other": torch.ones(3)})
    replica = Replica(memory_url)
    replica.sync()
    assert replica.state_dict().keys() == {"other"}


@pytest.mark.parametrize("waits", [False, True], ids=["live", "waiting"])
def test_an_encoder_that_fails_publishes_nothing(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    publisher = Publisher(store)
    builders.publish(publisher, builders.weights())
    gate = store.hold_at("create", keys.VERSIONS)
    if waits:
        publisher.publish(builders.weights().items())
        assert gate.entered.wait(60)
    else:
        gate.opened.set()

    def fail(*arguments: Any) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(VectorCodec, "encode", fail)
        receipt = publisher.publish(builders.trained(builders.weights(), 1).items())
        gate.opened.set()
        with pytest.raises(PublishError):
            receipt.wait(60)
        with pytest.raises(PublishError):
            _ = receipt.payload_bytes
    weights = builders.trained(builders.weights(), 2)
    receipt = builders.publish(publisher, weights)
    assert (receipt.version, receipt.kind) == (2 + waits, "anchor")
    assert_holds(store, weights)
    publisher.close()


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each changed tensor is a part, and nothing goes into the record."""
    monkeypatch.setattr("deltasync.publish.encode.GROUP_CHANGED", 1)
    monkeypatch.setattr("deltasync.publish.encode.INLINE_BYTES", 0)


@pytest.mark.usefixtures("in_parts")
def test_receipts_keep_no_weights(store: FaultyStore) -> None:
    def ended() -> tuple[list[Receipt], weakref.ref[object]]:
        publisher = Publisher(store, retries=0)
        receipts = [builders.publish(publisher, builders.weights())]
        store.fail_at("put", keys.PARTS, times=FOREVER, error=StoreError)
        receipts.append(publisher.publish(builders.trained(builders.weights(), 1).items()))
        publisher._uploader.close()
        return receipts, weakref.ref(publisher._shadow)

    receipts, shadow = ended()
    gc.collect()
    assert shadow() is None
    with pytest.raises(PublishError, match="was not published"):
        receipts[1].wait()


@pytest.mark.usefixtures("in_parts")
def test_publishing_from_the_very_moment_of_a_loss_never_builds_on_it(store: FaultyStore) -> None:
    # The next publish runs as soon as the loss is known, before the uploader's thread takes the version that
    # waited.
    publisher = Publisher(store, retries=0)
    builders.publish(publisher, builders.weights())
    gate = store.hold_at("put", keys.PARTS)
    lost = publisher.publish(builders.trained(builders.weights(), 1).items())
    assert gate.entered.wait(60)
    publisher.publish(builders.trained(builders.weights(), 2).items())
    store.fail_at("put", keys.PARTS, error=StoreError)
    weights = builders.trained(builders.weights(), 3)
    found: list[Receipt] = []
    published = threading.Event()

    def publish_now() -> None:
        found.append(publisher.publish(weights.items()))
        published.set()

    lost.when_done(publish_now)  # called in the uploader's thread
    gate.opened.set()
    with pytest.raises(PublishError):
        lost.wait(60)
    assert published.wait(60)
    publisher.close()
    assert found[0].kind == "anchor"
    assert_holds(store, weights, found[0].version)


def test_a_closed_publisher_refuses(memory_url: str) -> None:
    publisher = Publisher(memory_url)
    publisher.close()
    publisher.close()
    with pytest.raises(ConfigError):
        publisher.publish(builders.weights().items())


def test_an_error_in_the_with_block_is_not_hidden_by_a_lost_upload(store: FaultyStore) -> None:
    store.fail_at("create", "channel.json", error=StoreError)
    with pytest.raises(ZeroDivisionError), Publisher(store) as publisher:
        publisher.publish(builders.weights().items())
        raise ZeroDivisionError


def test_a_lost_upload_comes_out_of_the_with_block(store: FaultyStore) -> None:
    store.fail_at("create", "channel.json", error=StoreError)
    with pytest.raises(PublishError), Publisher(store) as publisher:
        publisher.publish(builders.weights().items())


@pytest.mark.parametrize(
    ("gone", "problem"),
    [
        ("channel.json", "channel.json was gone and is put back"),
        ("channel.json overwritten", "channel.json was overwritten and is put back"),
        ("versions/", "is gone"),
        ("anchors/", "is gone"),
        ("everything but head", "is gone"),
        ("everything", "channel.json was gone and is put back"),
    ],
)
def test_a_rule_that_deletes_old_objects_is_noticed_and_made_up_for(
    memory_url: str, caplog: pytest.LogCaptureFixture, gone: str, problem: str
) -> None:
    """While it trains on: head is always young, and the publisher needs nothing of what is gone."""
    store, model = open_store(memory_url), builders.weights()

    def publish(count: int) -> None:
        nonlocal model
        for _ in range(count):
            model = builders.trained(model, publisher.version, 0.001)
            publisher.publish(model.items()).wait(60)
            finish_maintenance(publisher)

    with Publisher(memory_url) as publisher:
        publish(3)
        builders.settle(publisher)
        before = store.read(keys.CHANNEL, 1 << 20)
        if gone == "channel.json overwritten":
            store.put(keys.CHANNEL, b"{}")
        else:
            listed = store.list("" if "everything" in gone else gone)
            store.delete(*(info.key for info in listed if info.key != keys.HEAD or gone == "everything"))
        publish(17)
        found = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert problem in caplog.text
        assert len(found) == 1 + ("everything" in gone)
        assert store.read(keys.CHANNEL, 1 << 20) == before
        assert_holds(memory_url, model, publisher.version)
        publish(17)
        assert [record for record in caplog.records if record.levelno == logging.ERROR] == found


def test_another_publishers_channel_is_not_put_back(memory_url: str) -> None:
    store, model = open_store(memory_url), builders.weights()
    with contextlib.suppress(FencedError), Publisher(memory_url) as publisher:
        publisher.publish(model.items()).wait(60)
        builders.settle(publisher)
        store.delete(*(info.key for info in store.list("")))
        with Publisher(memory_url) as other:
            other.publish(model.items()).wait(60)
            theirs = store.read(keys.CHANNEL, 1 << 20)
            with pytest.raises(FencedError):
                for seed in range(60):
                    publisher.publish(builders.trained(model, seed).items()).wait(60)
                    finish_maintenance(publisher)
            assert store.read(keys.CHANNEL, 1 << 20) == theirs


def test_a_checkpoint_that_the_run_overwrites_is_made_up_for(
    memory_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run saves into the directory of `initial=`, which late joiners start from."""
    model = builders.weights()
    bits = {name: tensor.contiguous() for name, tensor in model.items()}
    save_file(bits, tmp_path / "model.safetensors")
    with Publisher(memory_url, initial=tmp_path) as publisher:
        for seed in range(2):
            publisher.publish(model.items()).wait(60)
            model = builders.trained(model, seed)
        save_file(
            {name: tensor.contiguous() for name, tensor in model.items()}, tmp_path / "model.safetensors"
        )
        for seed in range(17):
            model = builders.trained(model, seed, 0.001)
            publisher.publish(model.items()).wait(60)
            finish_maintenance(publisher)
        assert "was overwritten" in caplog.text
        assert_holds(memory_url, model, publisher.version)


def test_a_checkpoint_that_is_away_while_it_is_referred_to_was_not_overwritten(
    store: FaultyStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a disk of the network. Once it is back, overwriting it is noticed."""
    model, base, away = builders.weights(), tmp_path / "base", tmp_path / "away"
    base.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in model.items()}, base / "model.safetensors")

    def publish(count: int) -> None:
        nonlocal model
        for seed in range(count):
            model = builders.trained(model, seed, 0.001)
            publisher.publish(model.items()).wait(60)
            finish_maintenance(publisher)

    with Publisher(store, initial=base) as publisher:
        gate = store.hold_at("create", keys.VERSIONS)
        receipt = publisher.publish(model.items())
        assert gate.entered.wait(60)
        base.rename(away)
        gate.opened.set()
        receipt.wait(60)
        away.rename(base)
        publish(17)
        assert "overwritten" not in caplog.text and _anchors(store) == []
        (base / "model.safetensors").write_bytes(b"")
        publish(17)
        assert "was overwritten" in caplog.text and _anchors(store) != []


def test_nothing_is_published_if_nothing_changed_and_that_is_asked_for(memory_url: str) -> None:
    weights = builders.weights()
    with Publisher(memory_url) as publisher:
        first = publisher.publish(weights.items(), if_changed=True)
        first.wait(60)
        assert publisher.publish(weights.items(), step=9, if_changed=True) is first
        second = publisher.publish(builders.trained(weights, 0).items(), if_changed=True)
        assert second.wait(60).version == 2
        # else one of its own
        assert publisher.publish(builders.trained(weights, 0).items()).wait(60).version == 3
    assert Replica(memory_url).sync() == 3


EXACT = [
    "layers.0.mlp.gate.e_score_correction_bias",
    "layers.0.mixer.A_log",
    "layers.0.mixer.D",
    "layers.0.mlp.down_proj.weight_scale_inv",
    "layers.0.mlp.down_proj.input_scale",
    "layers.0.mlp.down_proj.scales",
    "layers.0.mlp.down_proj.weight.absmax",
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_servers_keep_exactly_is_kept_unless_a_pattern_says_other(dtype: str, memory_url: str) -> None:
    tensors = {name: torch.tensor([1.003]) for name in EXACT} | {
        "w": torch.tensor([1.003]),
        "ID": torch.tensor([1.003]),
    }
    with Publisher(f"{memory_url}-a", dtype=dtype) as publisher:
        publisher.publish(tensors).wait(60)
    replica = Replica(f"{memory_url}-a")
    replica.sync()
    kept = {name for name, tensor in replica.state_dict().items() if tensor.dtype == torch.float32}
    assert kept == {*EXACT}
    with Publisher(f"{memory_url}-b", dtype=f"{dtype},*.D={dtype}") as publisher:
        publisher.publish(tensors).wait(60)
    replica = Replica(f"{memory_url}-b")
    replica.sync()
    assert replica.state_dict()["layers.0.mixer.D"].dtype == getattr(torch, dtype)


def test_what_is_wider_than_the_model_is_named_with_the_pattern_that_keeps_it(
    memory_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTASYNC_KEEP_LAST", "100")
    tensors = {"a.weight": torch.zeros(9, dtype=torch.bfloat16), "b.norm.weight": torch.zeros(3)}
    with Publisher(f"{memory_url}-a") as publisher:
        publisher.publish(tensors).wait(60)
    assert "b.norm.weight. A server with their dtype will differ. " in caplog.text
    assert 'dtype="auto,*norm.weight=keep"' in caplog.text
    caplog.clear()
    with Publisher(f"{memory_url}-b", dtype="auto,*norm.weight=keep") as publisher:
        publisher.publish(tensors).wait(60)
    with Publisher(f"{memory_url}-c") as publisher:
        publisher.publish({name: tensor.float() for name, tensor in tensors.items()}).wait(60)
    assert not caplog.records


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.tokens = torch.nn.Embedding(3, 2)
        self.head.weight = self.tokens.weight


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # of torch's compiler
@pytest.mark.parametrize("wrap", [lambda module: module, torch.compile, AveragedModel, torch.nn.DataParallel])
@pytest.mark.parametrize(
    ("tied", "name"), [(None, "head.weight"), ({"head.weight": "tokens.weight"}, "tokens.weight")]
)
def test_a_module_is_published_without_wrappers_and_each_storage_once(
    wrap: Any, tied: dict[str, str] | None, name: str, memory_url: str
) -> None:
    module = Tied()
    module._tied_weights_keys = tied  # type: ignore[assignment]
    outer = torch.nn.Sequential(torch.compile(module)) if wrap is torch.compile else module
    with Publisher(memory_url) as publisher:
        publisher.publish(wrap(outer)).wait(60)
    replica = Replica(memory_url)
    replica.sync()
    inner = "0." if wrap is torch.compile else ""
    expected = name if not inner else "head.weight"  # only the outermost module says what is tied
    assert [*replica.state_dict()] == [f"{inner}{expected}"]
